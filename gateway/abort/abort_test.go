package abort

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestACallerEndsItsOwnRequestsByTheirNames(t *testing.T) {
	var r Running
	told := make(chan string, 10)
	register := func(caller, name string) (unregister func()) {
		return r.Register(caller, name, func() { told <- caller + " " + name })
	}
	is := func(want string) func(string) bool { return func(name string) bool { return name == want } }
	register("a", "one")
	gone := register("a", "two")
	register("b", "one")
	require.Equal(t, 1, r.End("a", is("one")))
	require.Equal(t, "a one", <-told)
	require.Zero(t, r.End("c", is("one")), "of another caller")
	require.Zero(t, r.End("a", is("on")), "of another name")
	register("a", "two")
	require.Equal(t, 2, r.End("a", is("two")), "both have the name")
	<-told
	<-told
	gone()
	require.Equal(t, 2, r.End("a", func(string) bool { return true }))
	require.Empty(t, told, "both were ended before")
}

func TestARequestIsCancelledOnce(t *testing.T) {
	var r Running
	var begun atomic.Int32
	goesOn := make(chan struct{})
	r.Register("a", "one", func() { begun.Add(1); <-goesOn })
	all := func(string) bool { return true }
	var ending sync.WaitGroup
	for range 8 {
		ending.Go(func() { require.Equal(t, 1, r.End("a", all)) })
	}
	require.Eventually(t, func() bool { return begun.Load() > 0 }, 20*time.Second, time.Millisecond)
	close(goesOn)
	ending.Wait()
	require.Equal(t, 1, r.End("a", all), "it still runs, and has its name")
	require.EqualValues(t, 1, begun.Load())
}
