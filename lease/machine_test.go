package lease

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func seconds(s float64) time.Time {
	return time.Unix(0, 0).Add(time.Duration(s * float64(time.Second)))
}

func owner(t *testing.T) *Machine {
	m := NewMachine(Config{Self: "us-1_a", Home: true, Times: DefaultTimes})
	call, _ := m.Next(seconds(0))
	require.Equal(t, Look, call)
	m.Looked(seconds(0), seconds(0), Record{Epoch: 7, Stamp: "1"}, nil)
	call, _ = m.Next(seconds(0))
	require.Equal(t, Acquire, call)
	m.Acquired(seconds(0), seconds(0), Record{Holder: "us-1_a", Epoch: 8, Stamp: "2"}, nil)
	require.Equal(t, View{Phase: Owner, Admits: true, Holder: "us-1_a", Epoch: 8}, m.View(seconds(0)), "given back: nothing to wait for")
	return m
}

func TestRenewalCountsFromWhenItWasSent(t *testing.T) {
	m := owner(t)
	m.Renewed(seconds(2), seconds(6.5), nil)
	require.True(t, m.View(seconds(11.9)).Admits)
	require.Equal(t, Fenced, m.View(seconds(12)).Phase, "others count from when it was written, which may have been at once")
	m.Renewed(seconds(14), seconds(14), nil)
	require.True(t, m.View(seconds(14)).Admits, "nobody took it: the epoch is still this one")
}

func TestLeaseThatIsNotThereMayHaveBeenDeleted(t *testing.T) {
	m := NewMachine(Config{Self: "us-1_a", Home: true, Times: DefaultTimes})
	m.ObserveEpoch(3)
	m.Looked(seconds(0), seconds(0), Record{}, nil)
	call, _ := m.Next(seconds(14))
	require.Equal(t, Look, call, "its holder may renew it by pledges and create it again")
	m.Looked(seconds(14), seconds(14), Record{}, nil)
	call, _ = m.Next(seconds(15))
	require.Equal(t, Acquire, call)
	m.Acquired(seconds(15), seconds(16), Record{Holder: "us-1_a", Epoch: 4, Stamp: "1"}, nil)
	require.Equal(t, Starting, m.View(seconds(16)).Phase)
	for s := 17.; s < 36; s += 2 {
		m.Renewed(seconds(s), seconds(s), nil)
		require.Equal(t, Starting, m.View(seconds(s)).Phase, "another may have held one that was deleted a moment before")
	}
	m.Renewed(seconds(36), seconds(36), nil)
	require.Equal(t, Owner, m.View(seconds(36)).Phase)
}

func TestALeaseThatNobodyEverHeldIsTakenAtOnceAndWaitedFor(t *testing.T) {
	m := NewMachine(Config{Self: "us-1_a", Home: true, Times: DefaultTimes})
	m.Looked(seconds(0), seconds(0), Record{}, nil)
	call, _ := m.Next(seconds(0))
	require.Equal(t, Acquire, call)
	m.Acquired(seconds(0), seconds(0), Record{}, errLate)
	m.Looked(seconds(5), seconds(5), Record{Holder: "us-1_a", Epoch: 1, Stamp: "1"}, nil)
	for s := 5.; s < 25; s += 2 {
		m.Renewed(seconds(s), seconds(s), nil)
		require.Equal(t, Starting, m.View(seconds(s)).Phase, "it came to pass at any moment until now")
	}
	m.Renewed(seconds(25), seconds(25), nil)
	require.Equal(t, Owner, m.View(seconds(25)).Phase)
}

// A claim was given up right after it had taken a lease that the store did not know, and the
// process claims the scope again. Then the later claim has as long to wait as the earlier one had:
// the holder before may still admit.
func TestALeaseOfAnEarlierClaimIsWaitedFor(t *testing.T) {
	lost := Record{}
	earlier := NewMachine(Config{Self: "us-1_a", Home: true, Times: DefaultTimes})
	earlier.Looked(seconds(0), seconds(0), lost, nil)
	call, _ := earlier.Next(seconds(0))
	require.Equal(t, Acquire, call)
	taken := Record{Holder: "us-1_a", Epoch: 1, Stamp: "1"}
	earlier.Acquired(seconds(0), seconds(0), taken, nil)
	require.Equal(t, Starting, earlier.View(seconds(9)).Phase)
	earlier.Leave(seconds(1))
	call, _ = earlier.Next(seconds(1))
	require.Equal(t, None, call, "it is not released")

	m := NewMachine(Config{Self: "us-1_a", Home: true, Times: DefaultTimes})
	m.Looked(seconds(2), seconds(2), taken, nil)
	for s := 2.; s < 20; s += 2 {
		m.Renewed(seconds(s), seconds(s), nil)
		require.Equal(t, Starting, m.View(seconds(s)).Phase)
	}
	m.Renewed(seconds(22), seconds(22), nil)
	require.Equal(t, Owner, m.View(seconds(22)).Phase)
}

func TestAcquisitionWhoseAnswerWasLostIsOursOnceRenewed(t *testing.T) {
	m := NewMachine(Config{Self: "us-1_a", Home: true, Times: DefaultTimes})
	m.Looked(seconds(0), seconds(0), Record{Epoch: 7, Stamp: "1"}, nil)
	m.Acquired(seconds(0), seconds(5), Record{}, errLate)
	call, _ := m.Next(seconds(5))
	require.Equal(t, Look, call, "not another acquisition: it may have come to pass")
	m.Looked(seconds(5), seconds(5), Record{Holder: "us-1_a", Epoch: 8, Stamp: "2"}, nil)
	require.False(t, m.View(seconds(5)).Admits)
	call, _ = m.Next(seconds(5))
	require.Equal(t, Renew, call)
	m.Renewed(seconds(5), seconds(5), nil)
	require.Equal(t, Starting, m.View(seconds(5)).Phase)
	require.True(t, m.View(seconds(10)).Admits)
}

func TestHolderOfTheSameNameIsAnotherProcess(t *testing.T) {
	m := NewMachine(Config{Self: "us-1_b", Home: true, Times: DefaultTimes})
	m.Looked(seconds(0), seconds(0), Record{Holder: "us-1_a", Epoch: 7, Stamp: "1"}, nil)
	require.Equal(t, Watching, m.View(seconds(0)).Phase, "itself it need not ask")
	call, _ := m.Next(seconds(14))
	require.Equal(t, Look, call)
	call, _ = m.Next(seconds(15))
	require.Equal(t, Acquire, call)
}

func TestWhoLeavesTakesNothingAgain(t *testing.T) {
	m := owner(t)
	m.Leave(seconds(1))
	require.False(t, m.View(seconds(1)).Admits)
	call, _ := m.Next(seconds(1))
	require.Equal(t, Release, call)
	m.Released(seconds(1), seconds(3), errLate)
	call, _ = m.Next(seconds(3))
	require.Equal(t, Release, call, "as often as it takes")
	m.Released(seconds(8), seconds(16), errLate)
	call, _ = m.Next(seconds(16))
	require.Equal(t, None, call, "until it has expired")
	call, _ = m.Next(seconds(30))
	require.Equal(t, None, call)
}

// What is wanted while a call is under way is done as soon as that has come back.
func TestACallUnderWayDelaysNothing(t *testing.T) {
	begin := time.Unix(0, 0)
	at := func(s int) time.Time { return begin.Add(time.Duration(s) * time.Second) }
	next := func(m *Machine, now time.Time, want Call) {
		t.Helper()
		call, _ := m.Next(now)
		require.Equal(t, want, call)
	}
	owner := func() *Machine {
		m := NewMachine(Config{Self: "a_1", Home: true, Times: DefaultTimes})
		next(m, at(0), Look)
		m.Looked(at(0), at(0), Record{Epoch: 3, Stamp: "x"}, nil)
		next(m, at(0), Acquire)
		m.Acquired(at(0), at(0), Record{Holder: "a_1", Epoch: 4, Stamp: "y"}, nil)
		next(m, at(2), Renew)
		return m
	}
	m := owner()
	require.NoError(t, m.GiveBack(at(2), 4))
	m.Renewed(at(2), at(3), nil)
	next(m, at(3), Release)
	m = owner()
	m.Leave(at(2))
	m.Renewed(at(2), at(3), nil)
	next(m, at(3), Release)

	m = NewMachine(Config{Self: "b_1", Times: DefaultTimes})
	m.canServe = true
	next(m, at(0), Look)
	m.SetRole(at(0), true, 0, true)
	m.Looked(at(0), at(1), Record{Holder: "a_1", Epoch: 4, Stamp: "y"}, nil)
	next(m, at(1), AskBack)
	m.AskedBack(at(1), ErrNotHolder)
	next(m, at(1), Look)
	m.Looked(at(1), at(1), Record{Holder: "a_1", Epoch: 4, Stamp: "y"}, nil)
	next(m, at(2), None)
}
