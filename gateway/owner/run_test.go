package owner

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/geo"
	"evenkeel/lease"
)

// slowLoad is a Host.Load of engines that hang.
func slowLoad(context.Context, string, bool) (ours, all []geo.Resident, silent []string) {
	time.Sleep(time.Second)
	return nil, nil, nil
}

// A rack whose engines hang has many groups. Run looks at peers and engines again when all of them
// have been asked.
func TestGroupsWhoseEnginesHangAreAskedAtTheSameTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, _ := setOf(t, Groups, &lent{})
		s.deps.Load = slowLoad
		all := map[string]*Scope{}
		for i := range 20 {
			a := s.newScope(fmt.Sprint("g", i))
			a.view.Store(&lease.View{Phase: lease.Starting})
			all[a.Name] = a
		}
		s.all.Store(&all)
		began := time.Now()
		s.countOthersRequests(t.Context(), began)
		require.Equal(t, time.Second, time.Since(began))
	})
}

// While Run waits for engines, a probe shows that a region has lost its proxy. Run must not judge
// by an earlier time afterwards.
func TestARegionThatIsTakenOverIsNotGivenBackByAnOldTick(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, _ := setOf(t, Regions, &lent{})
		n := &neighbours{set: s}
		s.succession, s.deps.Load = n, slowLoad
		regions := map[string]*Scope{"eu": s.newScope("eu"), "ap": s.newScope("ap")}
		for _, a := range regions {
			a.othersMayRunFor = withoutEnd
		}
		begun := time.Now()
		regions["eu"].static = lease.NewStatic("us-1", "eu-1", []string{"us-1"}, 0, begun) // gone from the start
		regions["ap"].static = lease.NewStatic("us-1", "ap-1", []string{"us-1"}, 5500*time.Millisecond, begun)
		s.all.Store(&regions)
		ctx, stop := context.WithCancel(t.Context())
		s.ctx = ctx
		var running sync.WaitGroup
		running.Go(func() { s.Run(ctx) })
		time.Sleep(5600 * time.Millisecond)
		s.OnProbe(geo.ProbeReport{Peer: "sa-1", Region: "sa"})
		require.True(t, s.Admits("ap"))
		lost := s.Losses()
		time.Sleep(5 * time.Second)
		select {
		case <-lost:
			t.Error("the region was given back to a proxy that is dead")
		default:
		}
		stop()
		running.Wait()
	})
}
