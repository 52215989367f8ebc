package abort

import (
	"testing"

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
	require.Len(t, told, 2)
}
