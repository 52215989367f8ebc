package fleet

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// Several engines may answer behind one address, each with an engine id of its own.
// A new id alone is then no restart: the hand-offs before it are kept from decode
// engines as long as that is not clear, and stay on the engine's account.
func TestAnEngineIDAloneRaisesNoMoreThanADoubt(t *testing.T) {
	const there, doubted, gone = "there", "doubted", "gone"
	type step struct {
		id    string  // a hand-off of that engine
		early bool    // whose probe was sent before anything else happened
		start float64 // else a start time that was read
	}
	for name, row := range map[string]struct {
		steps []step
		want  []string // of the hand-offs
	}{
		"ranks of one server":                        {[]step{{id: "e_dp0"}, {id: "e_dp1"}, {id: "e_dp11"}}, []string{there, there, there}},
		"another server":                             {[]step{{id: "e_dp0"}, {id: "f_dp0"}}, []string{doubted, there}},
		"a name that ends like a rank's":             {[]step{{id: "_dp"}, {id: "x_dp"}}, []string{doubted, there}},
		"ids that alternate":                         {[]step{{id: "a"}, {id: "b"}, {id: "a"}, {id: "b"}, {id: "c"}}, []string{there, there, there, there, there}},
		"an old id in an answer that was on its way": {[]step{{id: "a"}, {id: "b"}, {id: "a", early: true}}, []string{doubted, there, doubted}},
		"alternating after a restart":                {[]step{{id: "a"}, {id: "b"}, {id: "c"}, {id: "b"}}, []string{doubted, there, there, there}},
		"the same start time after both":             {[]step{{start: 1}, {id: "a"}, {id: "b"}, {start: 1}}, []string{there, there}},
		"a start time that was not read before":      {[]step{{id: "a"}, {start: 2}, {id: "b"}, {start: 2}}, []string{doubted, there}},
		"another start time, then another id":        {[]step{{start: 1}, {id: "a"}, {start: 2}, {id: "b"}}, []string{gone, there}},
		"another id, then another start time":        {[]step{{start: 1}, {id: "a"}, {id: "b"}, {start: 2}, {start: 2}}, []string{gone, doubted}},
		"and the id once more":                       {[]step{{start: 1}, {id: "a"}, {id: "b"}, {start: 2}, {id: "b"}, {start: 2}}, []string{gone, there, there}},
		"alternating ids, then another start time":   {[]step{{start: 1}, {id: "a"}, {id: "b"}, {id: "a"}, {start: 2}, {id: "c"}}, []string{gone, gone, gone, there}},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := config.Default()
			cfg.Profiles = map[string]mooncake.Profile{"a": {}}
			f := of(t, cfg)
			require.NoError(t, f.Add(Prefill, config.Engine{URL: "http://10.0.0.1:80", Profile: "a"}))
			key := f.order[0]
			early := f.Born(key)
			var all []Birth
			for _, s := range row.steps {
				if s.id == "" {
					f.lives(key, s.start, time.Now().Add(time.Millisecond))
					continue
				}
				born := f.Born(key)
				if s.early {
					born = early
				}
				all = append(all, f.Made(born, prefill.Candidate{ID: "10.0.0.1:80"}, s.id))
			}
			var got []string
			for _, h := range all {
				is := there
				switch over, sure := f.Outlived(h); {
				case sure:
					is = gone
				case over:
					is = doubted
				}
				got = append(got, is)
			}
			require.Equal(t, row.want, got)
		})
	}
}

// A name that leads to another host leads to another process, which has none of the KV: once, however the two are told apart then.
func TestANameThatMovesLeadsToAnotherProcess(t *testing.T) {
	cfg := config.Default()
	cfg.Profiles = map[string]mooncake.Profile{"a": {}}
	f := of(t, cfg)
	require.NoError(t, f.Add(Prefill, config.Engine{URL: "http://engine.test:80", Profile: "a"}))
	key := f.order[0]
	f.OnStatus(key, engine.Status{Up: true, StartTime: 1})
	before := f.Born(key)
	moved := engine.Moved{From: "10.0.0.1", To: "10.0.0.2", At: time.Unix(100, 0)}
	f.OnStatus(key, engine.Status{StartTime: 1, Moved: moved})
	gone, sure := f.Outlived(before)
	require.True(t, gone && sure)
	require.Equal(t, moved, *f.Statuses()[0].Moved)
	after := f.Born(key)
	f.OnStatus(key, engine.Status{Up: true, StartTime: 2, Moved: moved})
	gone, _ = f.Outlived(after)
	require.False(t, gone, "it is the process that was meant")
}
