package discover

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"pgregory.net/rapid"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// told is a source that says what a test says.
type told struct {
	name string
	says chan said
}

type said struct {
	engines []Engine
	err     error
}

func (s *told) Name() string { return s.name }

func (s *told) Run(ctx context.Context, tell func([]Engine, error)) {
	for {
		select {
		case x := <-s.says:
			tell(x.engines, x.err)
		case <-ctx.Done():
			return
		}
	}
}

// ledger is a fleet that writes down what it is told.
type ledger struct {
	mu     sync.Mutex // held while it is told; the test passes it between two looks
	log    []string
	has    map[string]Engine
	listed map[string]bool
	refuse error
	asked  int // how often Listed was called
}

func (l *ledger) Put(e Engine) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.refuse != nil {
		return l.refuse
	}
	l.note(e)
	return nil
}

func (l *ledger) SetAway(e Engine) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.note(e)
}

func (l *ledger) note(e Engine) {
	what := "+" + e.Key()
	if e.Away != "" {
		what += " " + e.Away
	}
	l.log = append(l.log, what)
	l.has[e.Key()] = e
}

func (l *ledger) Remove(e Engine) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.log = append(l.log, "-"+e.Key())
	delete(l.has, e.Key())
}

func (l *ledger) InConfig(e Engine) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.asked++
	return l.listed[e.Key()]
}

// pass orders what the test did before everything that is told later, and the
// other way round.
func (l *ledger) pass() {
	l.mu.Lock()
	defer l.mu.Unlock()
}

func (l *ledger) take() (log []string) {
	log, l.log = l.log, nil
	return log
}

// rig is a Discoverer of two sources in synctest's time.
type rig struct {
	*testing.T
	*Discoverer
	fleet *ledger
	a, b  *told
	probe func(Engine) error
	tried []string
}

func start(t *testing.T, probing bool) *rig {
	t.Helper()
	r := &rig{T: t, fleet: &ledger{has: map[string]Engine{}, listed: map[string]bool{}}, a: &told{"a", make(chan said)},
		b: &told{"b", make(chan said)}}
	cfg := Config{Fleet: r.fleet, Sources: []Source{r.a, r.b}, Registerer: prometheus.NewRegistry()}
	if probing {
		r.probe = func(Engine) error { return nil }
		cfg.Probe = func(_ context.Context, e Engine) error {
			r.fleet.mu.Lock()
			defer r.fleet.mu.Unlock()
			r.tried = append(r.tried, e.Address)
			return r.probe(e)
		}
	}
	r.Discoverer = New(cfg)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.Discoverer.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return r
}

func (r *rig) say(s *told, engines ...Engine) {
	s.says <- said{engines: engines}
	r.wait(0)
}

// wait lets time pass, and everything happen that is due then.
func (r *rig) wait(d time.Duration) {
	r.fleet.pass()
	time.Sleep(d)
	synctest.Wait()
	r.fleet.pass()
}

func (r *rig) state(address string) string {
	for _, e := range r.Status().Engines {
		if e.ID == address {
			return e.State
		}
	}
	return "unknown"
}

func at(address string) Engine {
	return Engine{Role: Decode, Address: address, URL: "http://" + address}
}

func as(e Engine, incarnation, away string) Engine {
	e.Incarnation, e.Away = incarnation, away
	return e
}

func TestTheFleetIsToldTheDifference(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, false)
		r.say(r.a, at("x:1"), at("y:1"))
		require.Equal(t, []string{"+decode x:1", "+decode y:1"}, r.fleet.take())
		r.say(r.a, at("y:1"), at("x:1"))
		require.Empty(t, r.fleet.take(), "the same in another order")
		slots := at("x:1")
		slots.Slots = 8
		r.say(r.a, slots, at("y:1"), at("z:1"))
		require.Equal(t, []string{"+decode x:1", "+decode z:1"}, r.fleet.take(), "described anew, and new")
		r.say(r.a, slots)
		require.ElementsMatch(t, []string{"-decode y:1", "-decode z:1"}, r.fleet.take())
		r.say(r.a)
		require.Equal(t, []string{"-decode x:1"}, r.fleet.take(), "an empty list is a list")
	})
}

func TestAFailingSourceChangesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, false)
		r.say(r.a, at("x:1"))
		r.fleet.take()
		r.a.says <- said{err: errors.New("away")}
		r.wait(0)
		require.Empty(t, r.fleet.take())
		require.Equal(t, "away", r.Status().Sources[0].Error)
		require.Equal(t, InUse, r.state("x:1"))
		require.EqualValues(t, 1, testutil.ToFloat64(r.metrics.stale.WithLabelValues("a")))
		r.say(r.a, at("x:1"))
		require.Empty(t, r.Status().Sources[0].Error)
		require.EqualValues(t, 0, testutil.ToFloat64(r.metrics.stale.WithLabelValues("a")))
	})
}

// The texts of one failure differ by ports and times. It is said once, until the
// source works again or fails otherwise.
func TestAFailureIsSaidOnce(t *testing.T) {
	core, logs := observer.New(zap.InfoLevel)
	d := New(Config{Sources: []Source{&told{name: "a"}}, Log: zap.New(core)})
	refused := func(port int) error {
		return fmt.Errorf("watch pods: %w",
			&net.OpError{Op: "dial", Net: "tcp", Addr: &net.TCPAddr{Port: port}, Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)})
	}
	for i, step := range []struct {
		err  error
		said string // empty: nothing
	}{
		{refused(1), "discovery fails; the engines that it found last stay in use"},
		{refused(2), ""},
		{fmt.Errorf("list pods: %w", refused(3)), ""},
		{errors.Join(refused(4), refused(5)), ""},
		{fmt.Errorf("list pods: %w", context.DeadlineExceeded), "discovery fails; the engines that it found last stay in use"},
		{fmt.Errorf("Get https://api/?timeoutSeconds=%d: %w", 423, context.DeadlineExceeded), ""},
		{refused(6), ""},
		{errors.Join(refused(7), fmt.Errorf("list pods: %w", context.DeadlineExceeded)), ""},
		{errors.Join(refused(7), io.ErrUnexpectedEOF), "discovery fails; the engines that it found last stay in use"},
		{nil, "discovery works again"},
		{nil, ""},
		{fmt.Errorf("Get https://api/?timeoutSeconds=%d: %w", 512, context.DeadlineExceeded), "discovery fails; the engines that it found last stay in use"},
	} {
		d.storeList(sourceReport{0, nil, step.err}, time.Now())
		var said []string
		for _, l := range logs.TakeAll() {
			said = append(said, l.Message)
		}
		require.Equal(t, step.said, strings.Join(said, ", "), "step %d", i)
	}
}

// One half of a source may know of engines while the other half fails: they are used, and the
// failure stays.
func TestAListThatComesWithAFailureIsUsed(t *testing.T) {
	core, logs := observer.New(zap.InfoLevel)
	d := New(Config{Sources: []Source{&told{name: "a"}}, Log: zap.New(core)})
	d.storeList(sourceReport{0, []Engine{at("x:1")}, nil}, time.Now())
	d.storeList(sourceReport{0, nil, io.ErrUnexpectedEOF}, time.Now())
	require.Len(t, d.lists[0], 1, "it stays in force")
	d.storeList(sourceReport{0, []Engine{}, io.ErrUnexpectedEOF}, time.Now())
	require.Empty(t, d.lists[0])
	require.NotEmpty(t, d.sources[0].Error)
	require.Equal(t, 1, logs.Len(), "nothing works again")
}

func TestOfTwoSourcesTheFirstCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, false)
		mine, theirs := at("x:1"), at("x:1")
		mine.Slots, theirs.Slots = 1, 2
		r.say(r.b, theirs)
		r.say(r.a, mine)
		require.Equal(t, 1, r.fleet.has["decode x:1"].Slots)
		r.say(r.a)
		require.Equal(t, 2, r.fleet.has["decode x:1"].Slots)
		require.NotContains(t, r.fleet.take(), "-decode x:1", "it was there all the time")
	})
}

func TestAwayIsNotGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, true)
		r.say(r.a, as(at("x:1"), "u1", NotReady))
		require.Empty(t, r.fleet.take(), "it never was there")
		require.Empty(t, r.tried, "and is not tried before it is ready")
		require.Equal(t, Away, r.state("x:1"))
		r.say(r.a, as(at("x:1"), "u1", ""))
		require.Equal(t, []string{"+decode x:1"}, r.fleet.take())
		r.say(r.a, as(at("x:1"), "u1", NotReady))
		r.say(r.a, as(at("x:1"), "u1", ""))
		r.say(r.a, as(at("x:1"), "u1", Leaving))
		require.Equal(t, []string{"+decode x:1 not ready", "+decode x:1", "+decode x:1 leaving"}, r.fleet.take())
		require.Len(t, r.tried, 1, "once, before the first request")
		r.say(r.a)
		require.Equal(t, []string{"-decode x:1"}, r.fleet.take())
	})
}

func TestAnotherAtTheSameAddressIsAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, true)
		r.say(r.a, as(at("x:1"), "u1", ""))
		r.fleet.take()
		r.probe = func(Engine) error { return errors.New("still loading") }
		r.say(r.a, as(at("x:1"), "u2", ""))
		require.Equal(t, []string{"-decode x:1"}, r.fleet.take(), "the first at once, the second when it has proved itself")
		r.probe = func(Engine) error { return nil }
		r.wait(2 * firstRetryDelay)
		require.Equal(t, []string{"+decode x:1"}, r.fleet.take())
		require.Equal(t, "u2", r.fleet.has["decode x:1"].Incarnation)

		r.say(r.a, as(at("x:1"), "u2", Leaving), as(at("x:1"), "u3", ""))
		require.Equal(t, "u3", r.fleet.has["decode x:1"].Incarnation, "of two at one address the one that is to serve")
	})
}

func TestWhatFailsItsProbeIsTriedAgainLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, true)
		r.probe = func(Engine) error { return errors.New("no hand-off") }
		r.say(r.a, at("x:1"))
		r.wait(6 * maxRetryDelay)
		require.Equal(t, Unfit, r.state("x:1"))
		require.Equal(t, "no hand-off", r.Status().Engines[0].Why)
		require.Empty(t, r.fleet.take())
		n := len(r.tried)
		require.Greater(t, n, 7, "often at first")
		require.Less(t, n, 15, "then once a minute")
		r.probe = func(Engine) error { return nil }
		r.wait(2 * maxRetryDelay)
		require.Equal(t, InUse, r.state("x:1"))
		require.Equal(t, []string{"+decode x:1"}, r.fleet.take())
		require.EqualValues(t, n, testutil.ToFloat64(r.metrics.probes.WithLabelValues(Decode, "failed")))
	})
}

func TestWhatTheFleetRefusesIsToldAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, false)
		r.fleet.refuse = errors.New("no such profile")
		r.say(r.a, at("x:1"))
		require.Equal(t, Unfit, r.state("x:1"))
		r.fleet.refuse = nil
		r.wait(2 * firstRetryDelay)
		require.Equal(t, InUse, r.state("x:1"))
	})
}

// redescribed starts a discoverer whose source has given an engine in use another description,
// which the fleet refuses.
func redescribed(t *testing.T) (r *rig, wrong Engine) {
	r = start(t, false)
	r.say(r.a, at("x:1"))
	wrong = at("x:1")
	wrong.Profile = "unknown"
	r.fleet.refuse = errors.New("no such profile")
	r.say(r.a, wrong)
	return r, wrong
}

// The fleet keeps an engine whose new description it refuses, so the engine is no unfit one, which
// would get no requests.
func TestAnEngineWhoseNewDescriptionIsRefusedIsInUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, wrong := redescribed(t)
		found := r.Status().Engines[0]
		require.Equal(t, InUse, found.State)
		require.Equal(t, "no such profile", found.Why)
		require.Equal(t, 1, found.Tries)
		require.EqualValues(t, 1, testutil.ToFloat64(r.metrics.engines.WithLabelValues("a", InUse)))
		require.EqualValues(t, 0, testutil.ToFloat64(r.metrics.engines.WithLabelValues("a", Unfit)))
		r.say(r.a, as(wrong, "", Leaving))
		require.Equal(t, Away, r.state("x:1"))
		r.fleet.refuse = nil
		r.say(r.a, wrong)
		require.Equal(t, Found{ID: "x:1", Role: Decode, Source: "a", State: InUse}, r.Status().Engines[0])
	})
}

func TestTheLogSaysWhetherARefusedEngineIsUsed(t *testing.T) {
	core, logs := observer.New(zap.WarnLevel)
	d := New(Config{Log: zap.New(core)})
	for said, r := range map[string]*record{
		"a discovered engine is not used, because its trial failed":                              {},
		"the new description of a discovered engine cannot be used; its last one stays in force": {inFleet: new(at("x:1"))},
	} {
		d.recordFailure(r, time.Now(), errors.New("no such profile"))
		require.Equal(t, said, logs.TakeAll()[0].Message)
	}
}

// A description that the fleet refuses keeps no engine in service that leaves.
func TestAnEngineLeavesAlthoughItsNewDescriptionIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, wrong := redescribed(t)
		require.Equal(t, []string{"+decode x:1"}, r.fleet.take())
		r.say(r.a, as(wrong, "", Leaving))
		require.Equal(t, []string{"+decode x:1 leaving"}, r.fleet.take())
		require.Empty(t, r.fleet.has["decode x:1"].Profile, "the rest of its description is the one that the fleet took")
		r.wait(5 * maxRetryDelay)
		require.Empty(t, r.fleet.take(), "it is told once")
		r.say(r.a, wrong)
		require.Equal(t, []string{"+decode x:1"}, r.fleet.take(), "it is back")
		r.fleet.refuse = nil
		r.wait(2 * maxRetryDelay)
		require.Equal(t, "unknown", r.fleet.has["decode x:1"].Profile, "the fleet knows the profile now")
		require.Equal(t, InUse, r.state("x:1"))
	})
}

func TestTheConfigsOwnEnginesAreLeftAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, true)
		r.fleet.listed["decode x:1"] = true
		r.say(r.a, at("x:1"))
		require.Empty(t, r.fleet.take())
		require.Empty(t, r.tried)
		require.Equal(t, Listed, r.state("x:1"))
		r.fleet.listed = map[string]bool{}
		r.fleet.pass()
		r.Recheck()
		r.wait(0)
		require.Equal(t, []string{"+decode x:1"}, r.fleet.take(), "a reload took it out of the config")
		r.fleet.listed["decode x:1"] = true
		r.fleet.pass()
		r.Recheck()
		r.wait(0)
		r.say(r.a)
		require.Empty(t, r.fleet.take(), "the config has it now")
	})
}

// Each round asks the fleet about every engine, so the number of questions shows how many rounds
// there were. There is one when a source or a trial has said something, and when a try is due.
func TestThereIsNoRoundWithoutACause(t *testing.T) {
	unfit := errors.New("no hand-off")
	t.Run("an engine that failed its trial is in the config now", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			r := start(t, true)
			r.probe = func(Engine) error { return unfit }
			r.say(r.a, at("x:1"))
			require.Equal(t, Unfit, r.state("x:1"))
			r.fleet.listed["decode x:1"], r.fleet.asked = true, 0
			r.fleet.pass()
			r.Recheck()
			r.wait(time.Minute)
			require.Equal(t, Listed, r.state("x:1"))
			require.Less(t, r.fleet.asked, 10)
		})
	})
	t.Run("more trials are due than may run at the same time", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			r := start(t, true)
			r.probe = func(Engine) error {
				r.fleet.mu.Unlock() // the fleet is asked about the others meanwhile
				defer r.fleet.mu.Lock()
				time.Sleep(time.Minute)
				return unfit
			}
			var all []Engine
			for n := range 2 * maxTrials {
				all = append(all, at(fmt.Sprintf("x:%d", n+1)))
			}
			r.say(r.a, all...)
			r.wait(90 * time.Second)
			require.Less(t, r.fleet.asked/len(all), 100)
			require.Len(t, r.tried, 2*maxTrials)
		})
	})
}

func TestAnOperatorsWordStandsUntilTheSourceHasANewOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, false)
		r.say(r.a, at("x:1"))
		r.fleet.take()
		delete(r.fleet.has, "decode x:1") // removed by hand
		r.say(r.a, at("x:1"), at("y:1"))
		require.Equal(t, []string{"+decode y:1"}, r.fleet.take())
		slots := at("x:1")
		slots.Slots = 4
		r.say(r.a, slots, at("y:1"))
		require.Equal(t, []string{"+decode x:1"}, r.fleet.take())
	})
}

// Whatever sources say in whatever order, the fleet ends up with what they said
// last, and never has two incarnations of one address without a removal between.
func TestTheFleetHasWhatWasSaidLast(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		synctest.Test(t, func(t *testing.T) {
			r := start(t, rapid.Bool().Draw(rt, "probes"))
			lists := [2][]Engine{}
			for range rapid.IntRange(1, 12).Draw(rt, "answers") {
				source := rapid.IntRange(0, 1).Draw(rt, "source")
				seen := map[string]bool{}
				var list []Engine
				for range rapid.IntRange(0, 4).Draw(rt, "engines") {
					e := at(fmt.Sprintf("%c:1", rapid.IntRange('v', 'z').Draw(rt, "host")))
					if seen[e.Key()] {
						continue
					}
					seen[e.Key()] = true
					e.Incarnation = rapid.SampledFrom([]string{"u1", "u2"}).Draw(rt, "incarnation")
					e.Away = rapid.SampledFrom([]string{"", "", NotReady, Leaving}).Draw(rt, "away")
					list = append(list, e)
				}
				lists[source] = list
				r.say([]*told{r.a, r.b}[source], list...)
			}
			want := map[string]Engine{}
			for i, name := range []string{"b", "a"} {
				for _, e := range lists[1-i] {
					e.Source = name
					want[e.Key()] = e
				}
			}
			for key, has := range r.fleet.has {
				require.Equal(rt, want[key], has)
			}
			for key, e := range want {
				_, has := r.fleet.has[key]
				require.True(rt, has || e.Away != "", "%s is missing", key)
			}
			require.Subset(rt, slices.Collect(maps.Keys(want)), slices.Collect(maps.Keys(r.fleet.has)))
		})
	})
}
