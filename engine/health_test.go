package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/engine/circuit"
)

// What a health check, a request or a canary may meet.
var (
	errNoListener = &Error{Phase: PhaseConnect, Err: syscall.ECONNREFUSED}
	errNoConn     = &Error{Phase: PhaseConnect, Timeout: true, Err: context.DeadlineExceeded}
	errNoSocket   = &Error{Phase: PhaseConnect, Err: syscall.EMFILE}
	errSlow       = &Error{Phase: PhaseHead, Timeout: true, Err: context.DeadlineExceeded}
	errCut        = &Error{Phase: PhaseBody, Sent: true, Err: io.ErrUnexpectedEOF}
	err500        = &StatusError{Path: "/health", Status: 500}
)

// A step of a history is something that happens to an engine, which takes a second, or what is
// known of the engine then.
type step func(t *testing.T, s *scene)

// does is a step that makes a move.
func does(f func(h *health, now time.Time)) step { return func(_ *testing.T, s *scene) { s.move(f) } }

// sets is a step that changes what a check will find. It takes no time.
func sets(f func(s *scene)) step { return func(_ *testing.T, s *scene) { f(s) } }

// times makes these steps n times.
func times(n int, steps ...step) step {
	return func(t *testing.T, s *scene) {
		for range n {
			for _, one := range steps {
				one(t, s)
			}
		}
	}
}

// checks makes a check for each of these errors; nil: it is good.
func checks(found ...error) step {
	return sets(func(s *scene) {
		for _, err := range found {
			s.end(s.begin(), err)
		}
	})
}

// during makes a check that ends with err after these steps.
func during(err error, steps ...step) step {
	return func(t *testing.T, s *scene) {
		c := s.begin()
		times(1, steps...)(t, s)
		s.end(c, err)
	}
}

// isBusy makes a check that is not answered in time, while streams send tokens.
func isBusy(_ *testing.T, s *scene) {
	c := s.begin()
	c.streamed = true
	s.end(c, errSlow)
}

func stops(why error) step       { return sets(func(s *scene) { s.stopped = why }) }
func lists(err error) step       { return sets(func(s *scene) { s.listErr = err }) }
func later(d time.Duration) step { return sets(func(s *scene) { s.now = s.now.Add(d) }) }
func holds(why *Held) step       { return does(func(h *health, _ time.Time) { h.hold(why) }) }
func reports(err error) step {
	return does(func(h *health, now time.Time) { h.recordFailure(err, now) })
}
func accuses(n int) step { return does(func(h *health, _ time.Time) { h.addAccusations(n) }) }
func judges(v Verdict, why error) step {
	return does(func(h *health, now time.Time) { h.recordOutcome(v, why, now) })
}
func silent(is, hasSign bool) step {
	return does(func(h *health, now time.Time) { h.recordSilence(is, hasSign, now) })
}

// tries sends a canary as soon as one is due. isSilent says that the core still is.
func tries(outcome string, why error, isSilent bool) step {
	return func(t *testing.T, s *scene) {
		at, isScheduled := s.nextCanary()
		require.True(t, isScheduled, "a canary")
		if at.After(s.now) {
			s.now = at
		}
		s.sendCanary(s.now)
		s.move(func(h *health, now time.Time) { h.endCanary(outcome, why, isSilent, now) })
	}
}

// is says what the status must be: its state, and what its errors say. No text stands for no error.
func is(want State, says ...string) step {
	return func(t *testing.T, s *scene) {
		t.Helper()
		all := []string{errorText(s.Err), errorText(s.Halt), errorText(s.Out), errorText(s.Accused), errorText(s.LostRanks())}
		if s.Hangs {
			all = append(all, "hangs")
		}
		text := strings.Trim(strings.Join(all, "\n"), "\n")
		require.Equal(t, want, s.State(), text)
		if len(says) == 0 {
			require.Empty(t, text)
		}
		for _, one := range says {
			require.Contains(t, text, one)
		}
	}
}

// asks says why the next check must be made at once, and whether over a new connection.
func asks(why due, fresh bool) step {
	return func(t *testing.T, s *scene) {
		t.Helper()
		require.Equal(t, why, s.due)
		require.Equal(t, fresh, s.needsNewConnection(false))
	}
}

// finds says what a good check finds for who asked for it: why the engine does not work, if so.
func finds(silentCore error, want string) step {
	return func(t *testing.T, s *scene) {
		t.Helper()
		c := s.begin()
		c.silentCore = silentCore
		s.end(c, nil)
		require.Equal(t, want, errorText(s.found(c)))
	}
}

// canaryIn says when the next canary is due; 0: now.
func canaryIn(d time.Duration) step {
	return func(t *testing.T, s *scene) {
		t.Helper()
		at, isScheduled := s.nextCanary()
		require.True(t, isScheduled, "a canary")
		require.Equal(t, d, max(0, at.Sub(s.now)))
	}
}

func noCanary(t *testing.T, s *scene) {
	t.Helper()
	_, isScheduled := s.nextCanary()
	require.False(t, isScheduled, "a canary")
}

// What a sequence of checks, failed calls, judged requests and canaries leads to.
func TestHistoriesOfAnEngine(t *testing.T) {
	const outage = circuit.Limit
	why, noon := errors.New("the stream broke off"), &Held{"paused at noon"}
	restarts := sets(func(s *scene) { s.start++ })
	moves := sets(func(s *scene) { s.host++ })
	isNew := sets(func(s *scene) { s.health = health{in: s.in} })
	fails, served := judges(Faulted, why), judges(Served, nil)
	passes, broken := tries(canaryPassed, nil, false), tries(canaryFailed, why, false)
	noOutage := func(t *testing.T, s *scene) { require.NoError(t, s.Out) }
	changed := func(up, state time.Duration) step { // so long ago
		return func(t *testing.T, s *scene) {
			require.Equal(t, []time.Duration{up, state}, []time.Duration{s.now.Sub(s.Since), s.now.Sub(s.Changed)})
		}
	}
	for name, history := range map[string][]step{
		// Checks.
		"down after two misses, up after one answer": {
			checks(err500), is(Up, "answered 500"), asks(notDue, true), checks(err500), is(Down, "answered 500"),
			checks(nil), is(Up), asks(notDue, false), checks(errNoListener), is(Up, "refused"), checks(nil, err500),
			is(Up, "500"), checks(errNoListener), is(Down, "refused"), asks(notDue, true), checks(nil), is(Up)},
		"it stands still: that is told at once, and requests wait for a while": {
			checks(errSlow), is(Up, "hangs", "it does not answer its health check (5 s): "), checks(errSlow),
			is(Late, "hangs"), later(Standstill - 5*time.Second), checks(errSlow), is(Late, "hangs"), checks(errSlow),
			is(Down, "hangs"), checks(nil), is(Up)},
		"nobody listens there any more": {
			checks(errSlow, errSlow), is(Late, "hangs"), checks(errNoListener), is(Down, "refused")},
		"a late check takes no engine whose streams go on": {
			times(60, isBusy), is(Up, "it answered a health check too late, while requests go on: "),
			checks(errSlow, errSlow), is(Down, "hangs"), isBusy, is(Up, "too late"), checks(nil), is(Up)},
		"but one without a list of models": {isNew, times(2, isBusy), is(Down, "hangs")},
		"an address that is no engine's": {
			lists(ErrNotAnEngine), checks(nil), is(Down, "check that the address is an engine's")},
		"it refuses the key": {
			checks(ErrCredential), is(Down, "refused the proxy's API key"), checks(nil), is(Up), lists(ErrCredential),
			checks(nil), is(Down, "refused the proxy's API key"), lists(nil), checks(nil), is(Up)},
		"a proxy without free sockets blames no engine": {
			judges(Silent, why), times(9, checks(errNoSocket), reports(errNoSocket), judges(Faulted, errNoSocket)),
			is(Up, "the proxy cannot check it, because it can open no connection: "),
			tries(canaryNotMade, errNoSocket, false), canaryIn(minCanaryInterval - time.Second), passes, served,
			checks(nil), is(Up), noCanary, times(outage, fails), canaryIn(1 * time.Second),
			tries(canaryNotMade, errNoSocket, false), is(Out, "5 requests"), canaryIn(2 * time.Second),
			checks(err500, err500), is(Down, "500"), checks(errNoSocket), is(Down, "the proxy cannot")},
		"when it changed": {
			later(time.Minute), checks(err500, err500), changed(0, 0), checks(nil), reports(ErrPaused),
			changed(1*time.Second, 0)},

		// Calls that failed.
		"a refused connection": {
			reports(fmt.Errorf("probe: %w", errNoListener)), is(Down, "refused"), asks(dueNow, true)},
		"one that is not made in time": {reports(errNoConn), is(Up), asks(dueRedial, true)},
		"the proxy's own abort": {
			reports(&Error{Phase: PhaseConnect, Aborted: true, Err: ErrAborted}), is(Up), asks(notDue, false)},
		"the proxy's own client is closed": {
			reports(&Error{Phase: PhaseConnect, Err: ErrClosed}), is(Up), asks(notDue, false)},
		"an answer that is none": {
			reports(&Error{Phase: PhaseHead, Sent: true, Err: ErrMalformed}), is(Up), asks(notDue, false)},
		"no answer in time": {reports(errSlow), is(Up), asks(notDue, false)},
		"what is no call":   {reports(why), reports(nil), is(Up), asks(notDue, false)},
		"a stream breaks, and the engine is gone": {
			reports(errCut), is(Up), asks(dueBroken, true), checks(errNoListener), is(Down, "refused")},
		"a stream breaks, and it is ill: that takes two checks": {reports(errCut), checks(err500), is(Up, "500")},
		"a check that had begun before does not overrule a report": {
			during(nil, reports(errNoListener)), is(Down, "refused"), checks(nil), is(Up),
			during(errSlow, reports(errNoListener)), is(Late, "hangs")},

		"it lacks a model that it lists": {
			times(3, reports(fmt.Errorf("404: %w", ErrUnlisted))), is(Up), asks(dueNow, false), checks(nil),
			sets(func(s *scene) { s.now = s.rereadAt.Add(minRereadInterval - 2*time.Second) }), reports(ErrUnlisted),
			asks(notDue, false), reports(ErrUnlisted), asks(dueNow, false), checks(err500, err500),
			reports(ErrUnlisted), asks(notDue, true)},

		// A check that is asked for.
		"it works, although it is paused": {finds(nil, ""), stops(ErrPaused), finds(nil, ""), is(Halted, "paused")},
		"it does not work": {
			finds(why, why.Error()), stops(why), finds(nil, why.Error()), stops(errDead), finds(nil, errDead.Error()),
			stops(ErrReforming), finds(nil, ErrReforming.Error()), stops(nil), lists(ErrNotAnEngine),
			finds(nil, ErrNotAnEngine.Error())},

		// A name that moves.
		"a name that leads to a host that is dead": {
			moves, times(60, isBusy),
			is(Down, "its name has another address now, 10.0.0.1 instead of 10.0.0.0, which was seen at 2001"), moves,
			checks(nil), is(Up), isBusy, is(Up, "too late")},
		"and nobody listens there": {
			moves, checks(errNoListener, errNoListener), is(Down, "its name has another address now")},
		"and nothing comes back from there": {
			moves, checks(errNoConn, errNoConn), is(Down, "its name has another address now")},

		// Requests that failed, and canaries.
		"five failures in a row take it out, and a canary brings it back": {
			times(outage-1, fails), served, times(outage-1, fails), is(Up), fails,
			is(Out, "5 requests in a row failed, the last: the stream broke off"), canaryIn(1 * time.Second), passes,
			is(Up), noCanary, times(outage, fails), is(Out, "5 requests"), canaryIn(2 * time.Second), passes, served,
			times(outage, fails), canaryIn(1 * time.Second), served, is(Up)},
		"a wedged one is found by its first silence": {
			judges(Silent, why), is(Up), canaryIn(0), broken, is(Wedged, "broke off"), canaryIn(1 * time.Second),
			broken, canaryIn(2 * time.Second), broken, canaryIn(4 * time.Second), is(Wedged, "broke off"), fails,
			canaryIn(3 * time.Second), passes, is(Up), noCanary},
		"one that is out, too": {times(outage, fails), broken, is(Wedged, "broke off"), served, is(Up)},
		"doubts are tried one at a time": {
			times(100, judges(Unclear, why)), is(Up), canaryIn(0), passes, noCanary, judges(Unclear, why),
			canaryIn(minCanaryInterval - 2*time.Second), served, noCanary},
		"without canaries it comes back by itself": {times(outage, fails), tries(canaryNotSent, nil, false), is(Up)},
		"its batch was full":                       {judges(Silent, why), tries(canaryVouched, nil, false), is(Up), noCanary},
		"a prefill engine is not judged": {
			sets(func(s *scene) { s.in.Canaries = nil }), times(9, fails), accuses(9), is(Up), noCanary},
		"a restart is forgiven": {
			judges(Silent, why), broken, is(Wedged, "broke off"), restarts, checks(nil), is(Up)},
		"no canary while it is down": {
			times(outage, fails), checks(err500, err500), is(Down, "500"), noCanary, checks(nil),
			is(Out, "5 requests"), canaryIn(0)},
		"failures that may be the requests' own": {
			accuses(maxAccused - 1), is(Up), accuses(1), is(Accused, "until another engine has answered one of them"),
			accuses(-1), is(Up), accuses(1), accuses(-9), accuses(maxAccused - 1), is(Up)},
		"no sign of life until a token comes": {
			silent(true, false), is(Accused, "no sign of life"), canaryIn(0), tries(canaryVouched, nil, true),
			silent(false, false), is(Accused, "no sign of life"), canaryIn(minCanaryInterval - 2*time.Second),
			silent(false, true), is(Up)},
		"or a canary passes": {
			silent(true, false), tries(canaryPassed, nil, true), is(Accused, "no sign of life"), silent(false, false),
			passes, is(Up)},

		// Halts.
		"it re-forms: a report is enough, and a list of models ends it": {
			times(outage-1, fails), reports(fmt.Errorf("prefill: %w", ErrReforming)),
			is(Halted, "its group re-forms"), noCanary, stops(ErrReforming), times(60, checks(nil)),
			is(Halted, "re-forms"), changed(65*time.Second, 60*time.Second), stops(nil), lists(err500), checks(nil),
			is(Halted, "re-forms"), lists(nil), checks(nil), is(Up), fails, is(Up)},
		"a check that had begun before does not end it": {
			during(nil, reports(ErrReforming)), is(Halted, "re-forms"), during(nil, reports(ErrRetired)),
			is(Down, "out of its group")},
		"nor is it over for one that is retired": {
			reports(ErrRetired), is(Down, "out of its group"), lists(ErrRetired), checks(nil), lists(err500),
			checks(nil), is(Down, "out of its group"), lists(nil), checks(nil), is(Up)},
		"only requests are told that it re-forms": {
			times(outage-1, reports(ErrReforming), is(Halted, "re-forms"), checks(nil), is(Up)),
			reports(ErrReforming), checks(nil),
			is(Out, "it refuses requests again and again, although its health checks do not say so: its group re-forms"),
			canaryIn(1 * time.Second), tries(canaryRefused, ErrReforming, false), is(Halted, "re-forms"), noCanary,
			checks(nil), is(Out, "again and again"), canaryIn(2 * time.Second), passes, is(Up)},
		"a canary that is withheld proves nothing": {
			judges(Silent, why), tries(canaryRefused, ErrReforming, false), stops(ErrReforming), checks(nil),
			is(Halted, "re-forms"), stops(nil), checks(nil), is(Up), noCanary},
		"a halt that does not end is an outage": {
			stops(ErrReforming), checks(nil), later(LongestHalt - 2*time.Second), checks(nil), is(Halted, "re-forms"),
			checks(nil), is(Down, "it has taken no requests for 10 minutes: its group re-forms"), stops(nil),
			checks(nil), is(Up), stops(ErrReforming), checks(nil), later(LongestHalt - 2*time.Second), checks(nil),
			is(Halted, "re-forms")},
		"also of an old vLLM, whose health check says so": {
			times(9, checks(ErrReforming)), is(Halted, "re-forms"), later(LongestHalt), checks(ErrReforming),
			is(Down, "10 minutes"), checks(nil), is(Up)},
		"a change of ranks that failed": {
			stops(ErrReforming), checks(nil), stops(errScaleFailed), checks(nil),
			is(Down, "could not change the number of its ranks"), stops(nil), checks(nil), is(Up)},
		"a fault": {stops(why), checks(nil), is(Halted, "broke off"), stops(nil), checks(nil), is(Up)},
		"a core that died": {
			stops(errDead), checks(nil), is(Down, "one of its workers has died"), stops(nil), checks(nil), is(Up)},
		"it is paused": {
			reports(ErrPaused), is(Halted, "it is paused"), stops(ErrPaused), checks(nil),
			is(Halted, "it is paused")},
		"no one blames one": {
			stops(ErrPaused), checks(nil), times(9, checks(nil)), stops(nil), checks(nil), is(Up), noCanary},
		"ranks that it does not have": {
			reports(&RankError{3, 3}), is(Up), reports(errors.Join(why, &RankError{2, 2})), reports(&RankError{1, 1}),
			is(Up, "rank 1 and those above it are lost: the engine has only 1 ranks now (elastic EP)"), checks(nil),
			is(Up, "rank 1"), stops(ErrReforming), checks(nil), stops(nil), checks(nil), is(Up),
			reports(&RankError{2, 2}), restarts, checks(nil), is(Up)},

		// An operator's hold.
		"one that is held is not judged": {
			times(outage-1, fails), holds(noon), is(Halted, "paused at noon"), times(outage, fails),
			times(9, judges(Silent, why)), times(9, reports(ErrPaused)), silent(true, false),
			times(9, checks(err500)), times(9, checks(errSlow)), is(Halted, "paused at noon"), noOutage, noCanary, holds(noon),
			holds(nil), is(Up), asks(dueNow, false), fails, is(Up)},
		"but nobody listens there": {holds(noon), reports(errNoListener), is(Down, "refused")},
		"its pause has the operator's reason": {
			stops(ErrPaused), checks(nil), holds(noon), checks(nil), is(Halted, "paused at noon"), holds(nil),
			is(Halted, "it is paused"), stops(nil), checks(nil), is(Up)},
		"a fault is told all the same": {stops(why), checks(nil), holds(noon), is(Halted, "broke off")},
	} {
		t.Run(name, func(t *testing.T) {
			times(1, history...)(t, newScene())
		})
	}
}

// The round trip is the mean of the health checks over connections that were open already, and for
// which the engine computed nothing.
func TestTheRoundTripOfAnEngine(t *testing.T) {
	now := time.Unix(1e9, 0)
	var f facts
	answered := func(c check, took time.Duration, withoutComputing bool) time.Duration {
		now = now.Add(time.Second)
		c.facts, c.began = f, now.Add(-took)
		c.answerCheck(withoutComputing, time.Minute, now)
		f = c.facts
		return f.rtt
	}
	const ms = time.Millisecond
	require.Zero(t, answered(check{fresh: true}, 20*ms, true), "it connects")
	require.Zero(t, answered(check{}, 20*ms, false), "it computes")
	require.Equal(t, 20*ms, answered(check{}, 20*ms, true))
	require.Equal(t, 50*ms, answered(check{}, 120*ms, true), "three tenths")
	now = now.Add(time.Minute)
	require.Equal(t, 50*ms, answered(check{}, 120*ms, true), "the connection may have expired")
	for range 30 {
		answered(check{}, 120*ms, true)
	}
	require.InDelta(t, 120, f.rtt.Milliseconds(), 1)
}
