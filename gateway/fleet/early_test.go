package fleet_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
)

// A prefill engine that restarts is another one to decode engines.
func TestAPrefillEngineThatRestartsIsNamedAnew(t *testing.T) {
	t.Parallel()
	for _, connector := range earlyConnectors {
		t.Run(string(connector), func(t *testing.T) {
			t.Parallel()
			b := early(t, connector, options{dirty: true})
			require.Equal(t, "right", b.Judge("one two", `"stream":true,`))
			require.Equal(t, "right", b.Judge("one two three", `"stream":true,`))
			b.Prefill[0].Kill()
			require.NoError(t, b.Prefill[0].Revive())
			b.Eventually("it is served again", func() bool { return b.Judge("four five six", `"stream":true,`) == "right" })
			require.Equal(t, "right", b.Judge("seven eight", `"stream":true,`))
		})
	}
}

var earlyConnectors = []refengine.Connector{refengine.AscendLayerwise, refengine.SGLang}
