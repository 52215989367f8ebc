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
	r.Write(t.Output())
	require.Empty(t, r.Breaches)
}

func TestWrongFlagsAreSaid(t *testing.T) {
	_, err := run(t.Context(), []string{"-nonsense"}, nil)
	require.Error(t, err)
}
