package decode

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher"
	"evenkeel/dispatcher/board"
	"evenkeel/pool"
)

// What the server does, the simulator does: the same requests for the same engines give the
// same assignments in the same order, round by round.
func TestTheServersLogIsWhatTheSimulatorDoes(t *testing.T) {
	for _, spec := range []string{"pjsq-kv", "br0", "brh", "evenkeel"} {
		t.Run(spec, func(t *testing.T) {
			f := simple(4, 4, 60_000)
			w, rng := &workload{}, rand.New(rand.NewPCG(1, 2))
			at := 0.0
			for range 400 {
				at += rng.ExpFloat64() * 130
				w.jobs = append(w.jobs, arrival{at: at, prompt: 100 + rng.Int32N(9000), output: 1 + rng.Int32N(60)})
			}
			served := serve(t, f.Groups[0], w, spec)
			r, err := newRun(&f, Load{Rho: 1}, w, board.Config{Policy: spec, Window: board.DefaultWindow})
			require.NoError(t, err)
			var simulated []logged
			r.round = func(round *board.Round) {
				line := logged{Tick: round.Tick, At: round.At.Sub(began).Milliseconds()}
				for _, a := range round.Assign {
					line.Assign = append(line.Assign, [2]uint64{a.Entry, uint64(a.Worker)})
				}
				simulated = append(simulated, line)
			}
			require.NoError(t, r.all(context.Background()))
			require.Greater(t, len(served), 300)
			for i := range min(len(served), len(simulated)) {
				require.Equal(t, served[i], simulated[i], "round %d", i)
			}
			require.Len(t, simulated, len(served))
		})
	}
}

// logged is a round of the decision log.
type logged struct {
	Tick   uint64      `json:"tick"`
	At     int64       `json:"t_ms"` // since the start
	Assign [][2]uint64 `json:"assign"`
}

// serve has the server admit requests for engines of one group, and returns its decision log.
// The clock is synctest's, so every event is over before the next one comes.
func serve(t *testing.T, g Group, w *workload, spec string) (log []logged) {
	file := filepath.Join(t.TempDir(), "log")
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		d, err := dispatcher.Start(t.Context(), dispatcher.Config{
			Config:      board.Config{Policy: spec, Window: board.DefaultWindow, TickLimit: time.Hour},
			DecisionLog: dispatcher.DecisionLogConfig{File: file},
		})
		require.NoError(t, err)
		var ws []board.Worker
		for i, r := range g.Ranks {
			ws = append(ws, board.Worker{ID: int32(i), Model: model, Group: "0", Barrier: true, Slots: r.Slots, Capacity: r.Capacity, Cost: 1,
				Up: true})
		}
		d.SetWorkers(ws)
		decisions, err := os.Open(file)
		require.NoError(t, err)
		defer func() { require.NoError(t, decisions.Close()) }()
		read := 0 // bytes of the log
		rounds := func() (fresh []logged) {
			synctest.Wait()
			text, err := io.ReadAll(decisions) // what is new
			require.NoError(t, err)
			for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
				var line logged
				require.NoError(t, json.Unmarshal(lines.Bytes(), &line))
				line.At -= start.UnixMilli()
				if len(line.Assign) == 0 {
					line.Assign = nil
				}
				fresh = append(fresh, line)
			}
			read += len(text)
			log = append(log, fresh...)
			return fresh
		}
		type running struct {
			*dispatcher.Slot
			prompt, left int32
			begin        int
		}
		engines := make([][]*running, len(g.Ranks))
		answers := map[uint64]<-chan dispatcher.Result{}
		ready := slices.Clone(w.jobs)
		for i := range ready {
			ready[i].key = uint64(i) + 1 // its ID
			ready[i].at += DefaultPrefill.time(ready[i].prompt)
		}
		slices.SortStableFunc(ready, func(a, b arrival) int { return int(math.Copysign(1, a.at-b.at)) })
		step, ends, done, now := 0, never, 0, 0.0
		for done < len(w.jobs) {
			if ends <= now {
				for _, all := range engines {
					for _, r := range all {
						if r.begin <= step {
							r.ReportStarted()
							r.Progress(r.Generated() + 1)
							r.left--
							synctest.Wait()
						}
					}
				}
				for i, all := range engines {
					engines[i] = slices.DeleteFunc(all, func(r *running) bool {
						if r.left > 0 {
							return false
						}
						done++
						d.Release(r.Slot, board.Outcome{Generated: r.Generated()})
						synctest.Wait()
						return true
					})
				}
				step, ends = step+1, never
			}
			for len(ready) > 0 && ready[0].at <= now {
				q := ready[0]
				answers[q.key] = d.Enqueue(&pool.Entry{
					ID: q.key, Model: model, Prompt: int(q.prompt), Arrival: start.Add(instant(w.jobs[q.key-1].at).Sub(began)), Entered: time.Now(),
				})
				synctest.Wait()
				ready = ready[1:]
			}
			for _, line := range rounds() {
				for _, a := range line.Assign {
					r := &running{Slot: (<-answers[a[0]]).Slot, prompt: w.jobs[a[0]-1].prompt, left: w.jobs[a[0]-1].output, begin: step}
					if ends < never {
						r.begin++
					}
					engines[a[1]] = append(engines[a[1]], r)
				}
			}
			most, busy := int64(0), false
			for _, all := range engines {
				kv := int64(0)
				for _, r := range all {
					kv += int64(r.prompt) + int64(r.Generated())
					busy = true
				}
				most = max(most, kv)
			}
			if busy && ends == never {
				ends = now + g.C0Ms + g.C1Ms*float64(most)
			}
			next := ends
			if len(ready) > 0 {
				next = min(next, ready[0].at)
			}
			// A window, a step that is waited for or a table may end before: what happens then shows in the
			// log.
			for at := time.Since(start); ; at += time.Millisecond / 2 {
				if until := start.Add(instant(next).Sub(began)); !start.Add(at).Before(until) {
					time.Sleep(time.Until(until))
					now = next
					break
				}
				time.Sleep(time.Until(start.Add(at)))
				synctest.Wait()
				if info, err := decisions.Stat(); err == nil && int(info.Size()) > read {
					now = float64(time.Since(start)) / float64(time.Millisecond)
					break
				}
			}
		}
		rounds()
	})
	return log
}
