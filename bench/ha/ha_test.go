package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestOwnersComeAndGo(t *testing.T) {
	if testing.Short() {
		t.Skip("takes 70 s")
	}
	r, err := play(t.Context(), options{lease: 3 * time.Second, load: time.Second, absence: 15 * time.Second, clients: 4})
	require.NoError(t, err)
	for _, x := range r.rows {
		t.Log(x[0], "|", x[1])
	}
	require.Empty(t, r.breaches)
}

func TestABreachIsSaidWhereItWas(t *testing.T) {
	r := &report{}
	r.add("a scene", "%d right", 3)
	r.hold(true, "a scene", "all is well")
	require.Equal(t, "held", r.rows[0][2])
	r.hold(false, "a scene", "%d wrong", 1)
	require.Equal(t, "**not held**", r.rows[0][2])
	require.Equal(t, []string{"a scene: 1 wrong"}, r.breaches)
}

func TestWrongFlagsAreSaid(t *testing.T) {
	_, err := run(t.Context(), []string{"-nonsense"}, nil)
	require.Error(t, err)
}
