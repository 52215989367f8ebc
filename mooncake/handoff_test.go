package mooncake

import (
	"encoding/json"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestHandoffIsTakenOnceAndBeforeItsDeadline(t *testing.T) {
	t0 := time.Unix(1_000_000, 0)
	params := json.RawMessage(`{"remote_block_ids":[[1]]}`)
	for _, tc := range []struct {
		name  string
		first time.Time // an earlier Take; zero: none
		at    time.Time
		want  error
	}{
		{"the first before the deadline gets it", time.Time{}, t0.Add(-1), nil},
		{"the second does not", t0.Add(-2), t0.Add(-1), ErrTaken},
		{"at the deadline it is gone", time.Time{}, t0, ErrExpired},
		{"after the deadline it is gone, taken or not", t0.Add(-1), t0.Add(1), ErrExpired},
		{"a Take that came too late does not count", t0.Add(1), t0.Add(-1), nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h := NewHandoff(params, t0, t0)
			require.Equal(t, t0, h.Deadline())
			if !tc.first.IsZero() {
				_, _ = h.Acquire(tc.first)
			}
			got, err := h.Acquire(tc.at)
			require.ErrorIs(t, err, tc.want)
			if tc.want == nil {
				require.Equal(t, params, got)
			} else {
				require.Nil(t, got)
			}
		})
	}
}

func TestManyTakersGetOneHandoff(t *testing.T) {
	h := NewHandoff(json.RawMessage(`{"a":1}`), time.Unix(2, 0), time.Unix(2, 0))
	var won atomic.Int32
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			if _, err := h.Acquire(time.Unix(1, 0)); err == nil {
				won.Add(1)
			}
		})
	}
	wg.Wait()
	require.Equal(t, int32(1), won.Load())
}

func TestAHandoffNobodyReadsMayBeDiscardedLate(t *testing.T) {
	t0 := time.Unix(1_000_000, 0)
	h := NewHandoff(json.RawMessage(`{"a":1}`), t0, t0.Add(time.Minute))
	_, err := h.Acquire(t0)
	require.ErrorIs(t, err, ErrExpired, "too late for a reader")
	_, err = h.Discard(t0.Add(time.Minute))
	require.ErrorIs(t, err, ErrExpired, "the engine has freed it")
	got, err := h.Discard(t0.Add(time.Minute - 1))
	require.NoError(t, err)
	require.JSONEq(t, `{"a":1}`, string(got))
	_, err = h.Discard(t0)
	require.ErrorIs(t, err, ErrTaken)
	_, err = h.Acquire(t0.Add(-1))
	require.ErrorIs(t, err, ErrTaken, "what was discarded is never decoded")
}
