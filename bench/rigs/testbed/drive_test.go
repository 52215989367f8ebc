package testbed

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/load"
)

func TestALoadWithoutAnEndLastsAsLongAsActAndTheOthers(t *testing.T) {
	var endless atomic.Int64
	goesOn := load.Config{URLs: []string{"http://a"}, Concurrency: 2, Own: func(context.Context, string, int) (load.Kind, string) {
		endless.Add(1)
		return load.OK, ""
	}}
	const least = 100
	counted := load.Config{URLs: []string{"http://a"}, Concurrency: 1, Count: 30}
	counted.Own = func(_ context.Context, _ string, i int) (load.Kind, string) {
		for i == 29 && endless.Load() < least {
			time.Sleep(time.Millisecond) // the other load goes on meanwhile
		}
		return "http_503/full", "wait"
	}
	got, err := Drive(t.Context(), func() error { return nil }, goesOn, counted)
	require.NoError(t, err)
	require.GreaterOrEqual(t, got[0].OK, least)
	require.Len(t, got[1].Failures, 30, "every failure is kept")

	failed := errors.New("failed")
	_, err = Drive(t.Context(), func() error { return failed }, goesOn, load.Config{URLs: []string{"http://a"}, Concurrency: 1, Count: 1,
		Own: func(ctx context.Context, _ string, _ int) (load.Kind, string) {
			<-ctx.Done()
			return load.Stopped, ""
		}})
	require.ErrorIs(t, err, failed)
}

func TestWhatATallyCounts(t *testing.T) {
	lost := load.Failure{Request: "r-1", Kind: load.ErrorEvent, Detail: `type "server_error", code "peer_lost": gone`}
	full := load.Failure{Request: "r-2", Kind: "http_503/full"}
	odd := load.Failure{Request: "r-3", Kind: load.WrongText, Detail: "x instead of y"}
	one := &load.Result{Sent: 6, OK: 3, Cancelled: 1, Failures: []load.Failure{lost, full}}
	two := &load.Result{Sent: 2, OK: 1, Failures: []load.Failure{odd}}
	got := Count(Told, one, two)
	require.Equal(t, &Tally{Sent: 8, Right: 4, Left: 1, Refused: 1, Broken: 1, Told: []load.Failure{lost, full}, Wrong: []load.Failure{odd},
		Kinds: map[string]int{"error_event": 1, "http_503/full": 1, "wrong_text": 1}}, got)
	require.Equal(t, "4 right, 1 `peer_lost`, 1 refused with 503 full, 1 wrong: r-3 wrong_text: x instead of y", got.String())
	for name, row := range map[string]struct {
		of              *Tally
		allRight, wrong int // breaches
	}{
		"wrong": {got, 1, 1}, "told": {Count(Told, one), 1, 0}, "none may": {Count(None, one), 1, 1}, "no request": {Count(Told), 1, 0},
		"right": {Count(None, &load.Result{Sent: 2, OK: 2}), 0, 0},
	} {
		all, none := &Report{}, &Report{}
		row.of.AllRight(all, "scene", "")
		row.of.NoneWrong(none, "scene", "")
		require.Len(t, all.Breaches, row.allRight, name)
		require.Len(t, none.Breaches, row.wrong, name)
	}
}
