package lease

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The static order, as asia-1 sees it.
func TestStaticOrder(t *testing.T) {
	begin := time.Unix(0, 0)
	at := func(s float64) time.Time { return begin.Add(time.Duration(s * float64(time.Second))) }
	s := NewStatic("asia-1", "us-1", []string{"eu-1", "asia-1"}, 15*time.Second, begin)
	require.Equal(t, "us-1", s.Owner(at(14.9)), "nobody is dead who was not watched long enough")

	s.Saw("us-1", at(10))
	s.Saw("eu-1", at(20))
	require.Equal(t, "us-1", s.Owner(at(24.9)))
	require.Equal(t, "eu-1", s.Owner(at(25)), "the home is dead for 15 s, the first in order lives")
	require.False(t, s.View(at(25)).Admits)
	require.Equal(t, "asia-1", s.Owner(at(35)), "so is the first, as seen from here")
	require.Equal(t, View{Phase: Owner, Admits: true, Holder: "asia-1"}, s.View(at(35)))

	s.Saw("eu-1", at(36))
	require.Equal(t, "eu-1", s.Owner(at(36)))
	s.Saw("us-1", at(37))
	require.Equal(t, "us-1", s.Owner(at(37)), "the home wins with its first answer")
}
