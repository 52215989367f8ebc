package testbed

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTheExitStatusTellsAWrongFlagFromAFailure(t *testing.T) {
	parsed := func(args ...string) error {
		flags := flag.NewFlagSet("study", flag.ContinueOnError)
		flags.SetOutput(io.Discard)
		flags.Int("ranks", 1, "of the study")
		return Parse(flags, args)
	}
	for _, row := range []struct {
		name   string
		err    error
		status int
		says   string
	}{
		{"it ran", parsed("-ranks", "2"), 0, ""},
		{"the help was asked for", parsed("-help"), 0, ""},
		{"a flag that there is not", parsed("-rank", "2"), 2, "study: flag provided but not defined: -rank\n"},
		{"a flag whose value is no number", parsed("-ranks", "two"), 2, "study: invalid value \"two\" for flag -ranks: parse error\n"},
		{"a part of the page has a wrong flag", errors.Join(nil, parsed("-rank")), 2, "study: flag provided but not defined: -rank\n"},
		{"the run failed", fmt.Errorf("no engine"), 1, "study: no engine\n"},
		{"something was not held, and the report has said so", errBreach, 1, ""},
	} {
		t.Run(row.name, func(t *testing.T) {
			var said strings.Builder
			require.Equal(t, row.status, exitStatus("study", row.err, &said))
			require.Equal(t, row.says, said.String())
		})
	}
}
