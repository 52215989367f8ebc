package mooncake

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestHowLongKVIsCertainlyKept(t *testing.T) {
	for _, row := range []struct {
		profile Profile
		want    time.Duration
	}{
		{Profile{Connector: NIXLPull}, 26250 * time.Millisecond},
		{Profile{Connector: NIXLPull, KVHoldTimeout: 2 * time.Minute}, 105 * time.Second},
		{Profile{Connector: AscendMooncakeV1}, 450 * time.Second},
		{Profile{Connector: NIXLPull, HoldMargin: 20 * time.Second}, 25 * time.Second},
	} {
		p := row.profile.WithDefaults()
		require.Equal(t, row.want, p.PulledWithin(), "%+v", row.profile)
	}
}

func TestAnAnswerThatMayBeAnotherPromptsIsWithheld(t *testing.T) {
	kept := time.Unix(1000, 0)
	late := kept.Add(time.Hour)
	for _, row := range []struct {
		name     string
		answer   Answer
		withheld bool
	}{
		{"a first event before the hold ends", Answer{Came: kept.Add(-1)}, false},
		{"when it ends", Answer{Came: kept}, true},
		{"whatever else is known", Answer{Came: kept, Freed: FreedNone}, true},
		{"one whose prefix cache may be wrong", Answer{Came: kept.Add(-1), Spoiled: true}, true},
		{"an answer in one piece before the hold ends", Answer{Came: kept.Add(-1), Whole: true, Silent: true, Freed: FreedSome}, false},
		{"later, and the prefill engine has freed nothing", Answer{Came: late, Whole: true, Silent: true, Freed: FreedNone}, false},
		{"later, and it has", Answer{Came: late, Whole: true, Freed: FreedSome}, true},
		{"later, and it does not count, and the core was silent", Answer{Came: late, Whole: true, Silent: true}, true},
		{"later, and it does not count, and the core was not", Answer{Came: late, Whole: true}, false},
		{"one whose prefix cache may be wrong, in one piece", Answer{Came: late, Whole: true, Freed: FreedNone, Spoiled: true}, true},
	} {
		t.Run(row.name, func(t *testing.T) {
			row.answer.KeptUntil = kept
			require.Equal(t, row.withheld, row.answer.MayBeAnotherPrompts())
		})
	}
}
