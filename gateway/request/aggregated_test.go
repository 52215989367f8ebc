package request

import (
	"cmp"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/dispatcher"
	"evenkeel/dispatcher/board"
	"evenkeel/gateway/config"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
	"evenkeel/mooncake"
	"evenkeel/pool"
	"evenkeel/prefill"
)

// listens takes down what it is told of an entry, and has no rank for it.
type listens struct {
	Dispatcher
	told pool.Entry
	err  error // nil: no rank is there
}

func (l *listens) EnqueueAggregated(e *pool.Entry, _ []board.Hit) <-chan dispatcher.Result {
	l.told = *e
	got := make(chan dispatcher.Result, 1)
	got <- dispatcher.Result{Err: cmp.Or(l.err, board.ErrNoWorkers)}
	return got
}

// What the dispatcher is told of a request for ranks that prefill and decode: their board, whether
// others come first, and for how long it may wait.
func TestWhatIsToldOfARequestForRanksThatDoBoth(t *testing.T) {
	arrive := time.Now().Add(-time.Second)
	for name, row := range map[string]struct {
		priority int
		batch    bool
		deadline time.Duration // of its client, from the arrival; 0: none
		ttl      time.Duration
		patience time.Duration // of the entry; 0: the pool's own
		express  bool
		prompt   int
		maxLen   int
		want     int
	}{
		"as long as in the arrival queue":           {patience: 7 * time.Second, prompt: 50, want: 50},
		"the pool's own limit":                      {ttl: time.Second, prompt: 50, want: 50},
		"of a higher priority":                      {priority: 1, patience: 7 * time.Second, express: true, prompt: 50, want: 50},
		"of a lower priority":                       {priority: -1, patience: 7 * time.Second, prompt: 50, want: 50},
		"batch has all of its time still":           {batch: true, priority: 1, patience: 7 * time.Second, prompt: 50, want: 50},
		"no longer than its first token is wanted":  {deadline: 3 * time.Second, patience: 3 * time.Second, prompt: 50, want: 50},
		"nor with the pool's own limit":             {deadline: 3 * time.Second, ttl: time.Second, patience: 3 * time.Second, prompt: 50, want: 50},
		"one that was counted is as long as it is":  {patience: 7 * time.Second, prompt: 5000, maxLen: 100, want: 5000},
		"one that was not is no longer than it may": {patience: 7 * time.Second, maxLen: 100, want: 100},
	} {
		t.Run(name, func(t *testing.T) {
			l := &listens{}
			srv := newServer(t, func(c *config.Config, _ *Deps) { c.Pool.TTL, c.Prefill.Queue.Timeout = row.ttl, 7*time.Second })
			l.Dispatcher, srv.Deps.Dispatcher = srv.Deps.Dispatcher, l
			kid, in := edge.NewCloseNotifier(zap.NewNop()),
				&Incoming{Record: srv.Journal.Begin(journal.LogEntry{ID: "x"}), Priority: row.priority, Batch: row.batch}
			in.Record.Arrival = arrive
			if row.deadline > 0 {
				in.Deadline = arrive.Add(row.deadline)
			}
			text := make([]byte, 4000)
			for i := range text {
				text[i] = 'a'
			}
			body, err := mooncake.ScanBody([]byte(`{"prompt":"`+string(text)+`"}`), 0)
			require.NoError(t, err)
			j := &job{
				srv: srv.Server, req: &openai.Request{Endpoint: mooncake.Completions}, body: body, client: struct{ client }{kid},
				model:    roster.Route{Name: "m", Board: "m", MaxLen: row.maxLen},
				incoming: in, record: in.Record, promptTokens: row.prompt,
			}
			srv.Places.Reserve()
			slot, f := j.placeAggregated(&prefill.Lease{Candidate: prefill.Candidate{ID: "g", Board: "m+aggregated", Aggregated: true}})
			require.Nil(t, slot)
			require.Equal(t, lifecycle.NoRank, f.Reason)
			require.Equal(t, "m+aggregated", l.told.Model)
			require.Empty(t, l.told.Prefiller)
			require.Equal(t, row.express, l.told.Express)
			require.Equal(t, row.want, l.told.Prompt)
			from := arrive
			if row.batch { // it was held back until now
				require.Greater(t, l.told.Arrival.Sub(arrive), time.Second-1)
				from = l.told.Arrival
			}
			if row.patience == 0 {
				require.Zero(t, l.told.Deadline)
			} else {
				require.Equal(t, from.Add(row.patience), l.told.Deadline)
			}
		})
	}
}

// A request that got no rank by its deadline is told so, and any other that it waited too long.
func TestADeadlineThatPassesWhileNoRankHasRoom(t *testing.T) {
	for name, row := range map[string]struct {
		deadline time.Duration // from now; 0: none
		err      error
		want     string
	}{
		"it has passed":      {-time.Millisecond, pool.ErrTimeout, "deadline_unmet"},
		"it has not":         {time.Hour, pool.ErrTimeout, "pool_timeout"},
		"there is none":      {0, pool.ErrTimeout, "pool_timeout"},
		"the ranks are gone": {-time.Millisecond, board.ErrNoWorkers, "decode_unavailable"},
	} {
		t.Run(name, func(t *testing.T) {
			srv := newServer(t, func(*config.Config, *Deps) {})
			srv.Deps.Dispatcher = &listens{Dispatcher: srv.Deps.Dispatcher, err: row.err}
			kid, in := edge.NewCloseNotifier(zap.NewNop()), &Incoming{Record: srv.Journal.Begin(journal.LogEntry{ID: "x"})}
			if row.deadline != 0 {
				in.Deadline = time.Now().Add(row.deadline)
			}
			body, err := mooncake.ScanBody([]byte(`{"prompt":"a"}`), 0)
			require.NoError(t, err)
			j := &job{
				srv: srv.Server, req: &openai.Request{Endpoint: mooncake.Completions}, body: body, client: struct{ client }{kid},
				model: roster.Route{Name: "m", Board: "m"}, incoming: in, record: in.Record,
			}
			srv.Places.Reserve()
			_, f := j.placeAggregated(&prefill.Lease{Candidate: prefill.Candidate{ID: "g", Board: "m+aggregated", Aggregated: true}})
			require.Equal(t, row.want, f.ClientError.Code)
		})
	}
}
