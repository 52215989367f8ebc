package dispatcher

import (
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/twin"
)

func TestThePolicyIsLeftToTheTwinUntilOneIsNamed(t *testing.T) {
	const list = "auto:br0,evenkeel,evenkeel:kappa=0"
	d, err := Start(t.Context(), Config{Config: board.Config{Policy: list, Twin: []string{"jsq-kv", "br0"}}})
	require.NoError(t, err)
	require.Equal(t, "br0", d.Policy(), "the first, to begin with")
	choose := func(spec string) {
		require.NoError(t, d.ask(func(r *runner) error {
			require.Equal(t, []string{"br0", "evenkeel", "evenkeel:kappa=0", "jsq-kv"}, []string(r.cfg.Twin))
			r.choose(twin.Choice{Spec: spec, Why: "it is better"})
			return nil
		}))
	}
	choose("evenkeel:kappa=0")
	require.Equal(t, "evenkeel:kappa=0", d.Policy())
	choose("jsq-kv")
	require.Equal(t, "evenkeel:kappa=0", d.Policy(), "one that is only compared is never chosen")
	a := d.Status(t.Context()).Auto
	require.True(t, a.On)
	require.EqualValues(t, 1, a.Changes)
	require.Equal(t, "it is better", a.Why)

	require.ErrorContains(t, d.SetPolicy("fastest"), "unknown policy")
	require.Error(t, d.SetPolicy(""))
	require.ErrorContains(t, d.SetPolicy("auto:br0,jsq"), "restart")
	choose("evenkeel")
	require.Equal(t, "evenkeel", d.Policy(), "what was refused changes nothing")
	require.NoError(t, d.SetPolicy("jsq-kv"))
	choose("br0")
	require.Equal(t, "jsq-kv", d.Policy(), "the operator has named one")
	require.False(t, d.Status(t.Context()).Auto.On)
	require.NoError(t, d.SetPolicy(list))
	require.Equal(t, "jsq-kv", d.Policy(), "until the twin finds a better one")
	choose("br0")
	require.Equal(t, "br0", d.Policy())
}

func TestAPolicyThatIsNotLeftToTheTwin(t *testing.T) {
	d, err := Start(t.Context(), Config{Config: board.Config{Policy: "br0"}})
	require.NoError(t, err)
	require.ErrorContains(t, d.SetPolicy("auto:br0,evenkeel"), "restart")
	require.Nil(t, d.Status(t.Context()).Auto)
}
