package kvevents

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/go-zeromq/zmq4/security/null"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/prefill/index"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// shared is an index behind a lock, as its owner keeps it.
type shared struct {
	sync.Mutex
	x *index.Index
}

func (s *shared) Stored(at index.Slot, keys []index.Key) {
	s.x.Insert(at, keys)
}

func (s *shared) Removed(at index.Slot, keys []index.Key) {
	for _, k := range keys {
		s.x.Remove(at, k)
	}
}

func (s *shared) Cleared(at index.Slot, why index.Reason) {
	s.x.Clear(at, why)
}

// rank is a reference engine with a prefix cache, and what the index knows of it.
type rank struct {
	*testing.T
	engine *refengine.Engine
	http   *http.Client
	sink   *shared
	slot   index.Slot
	stream *Stream
}

var scope = index.Scope{Model: "ref"}

const engineBlock = 128

// patience is how long a test waits for what takes milliseconds, unless the machine has much else
// to do.
const patience = time.Minute

func startRank(t *testing.T, c refengine.Config) *rank {
	t.Helper()
	c.Role, c.KVEvents.Address, c.Answers.PromptTokensDetails = refengine.Prefill, "127.0.0.1:0", true
	c.Prompts.Base, c.Prompts.PerToken, c.Steps.C0 = time.Microsecond, time.Nanosecond, time.Microsecond
	e, err := refengine.Start(c)
	require.NoError(t, err)
	t.Cleanup(e.Close)
	tr := &http.Transport{}
	t.Cleanup(tr.CloseIdleConnections)
	r := &rank{T: t, engine: e, http: &http.Client{Transport: tr}, sink: &shared{x: index.New(index.Config{})}}
	r.slot = r.sink.x.Add("p0/0", 0)
	return r
}

func (r *rank) follow() {
	r.Helper()
	events, replay := r.engine.KVEvents(0)
	r.stream = Start(Config{Place: Place{events, replay}, Slot: r.slot, Scope: scope, Sink: r.sink, ReplayTimeout: patience})
	r.Cleanup(r.stream.Close)
	r.eventually("connected", func() bool { return r.stream.Precise(time.Now()) })
}

func (r *rank) eventually(what string, ok func() bool) {
	r.Helper()
	if !assert.Eventually(r, ok, patience, 2*time.Millisecond, what) {
		require.FailNow(r, "in vain", "%+v", r.stream.Status())
	}
}

// ask has the engine compute a prompt and returns how many tokens of it were cached.
func (r *rank) ask(prompt string) (cached int) {
	r.Helper()
	body := fmt.Sprintf(`{"model":"ref","prompt":%q,"max_tokens":1,"min_tokens":1}`, prompt)
	res, err := r.http.Post(r.engine.URLs()[0]+"/v1/completions", "application/json", strings.NewReader(body))
	require.NoError(r, err)
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	require.NoError(r, err)
	require.Equal(r, 200, res.StatusCode, "%s", text)
	_, rest, _ := strings.Cut(string(text), `"cached_tokens":`)
	_, err = fmt.Sscan(strings.TrimRight(strings.SplitN(rest, "}", 2)[0], "} "), &cached)
	require.NoError(r, err, "%s", text)
	return cached
}

// hit is how many tokens of a prompt the index says are cached.
func (r *rank) hit(prompt string) int {
	ids := reftext.Of(prompt).IDs
	var h index.Hasher
	keys := h.Tokens(nil, scope.Root(index.Tokens, engineBlock), ids, engineBlock)
	r.sink.Lock()
	defer r.sink.Unlock()
	return index.UsableHit(int(r.sink.x.Match(nil, keys)[r.slot.N])*engineBlock, len(ids), engineBlock)
}

func prompts(n int) (all []string) {
	for i := range n {
		all = append(all, reftext.MakePrompt(uint64(i), 400+90*(i%5)))
	}
	return all
}

func TestTheIndexKnowsWhatTheEngineHolds(t *testing.T) {
	for _, encoding := range []string{"array", "map"} {
		t.Run(encoding, func(t *testing.T) {
			r := startRank(t, refengine.Config{KV: refengine.KV{PrefixCache: 24},
				KVEvents: refengine.KVEvents{Encoding: encoding}}) // room for five or so
			all := prompts(12)
			for _, p := range all[:8] {
				r.ask(p) // before anybody listens: the replay tells of them
			}
			r.follow()
			require.True(t, r.stream.Complete())
			first := r.subscribed()
			for i := range 40 {
				p := all[i*7%len(all)]
				r.eventually("the engine's last word", func() bool { return r.stream.Status().Blocks == int64(r.held()) })
				predicted := r.hit(p)
				require.Equal(t, predicted, r.ask(p), "prompt %d", i)
				r.eventually("its blocks", func() bool { return r.hit(p) >= (len(reftext.Of(p).IDs)-1)/engineBlock*engineBlock })
			}
			res, err := r.http.Post(r.engine.URLs()[0]+"/reset_prefix_cache", "", nil)
			require.NoError(t, err)
			res.Body.Close()
			r.eventually("cleared", func() bool { return r.held() == 0 })
			s := r.stream.Status()
			require.Zero(t, s.DecodeErrors+s.UnknownTypes+s.UnknownParents+s.Skipped+s.GapsCold, "%+v", s)
			require.Equal(t, first.GapsReplayed, s.GapsReplayed, "%+v", s)
			require.Less(t, s.LagMs, 10_000.0)
		})
	}
}

// subscribed waits until the engine's publisher knows its subscriber. What it
// published before, after the replay, shows with the next batch only.
func (r *rank) subscribed() Status {
	r.Helper()
	before, more := r.stream.Status().Batches, uint64(1000)
	r.eventually("a batch as it was published", func() bool {
		r.ask(reftext.MakePrompt(more, 300))
		more++
		return r.stream.Status().Batches > before
	})
	r.eventually("all of them", func() bool { return r.hit(reftext.MakePrompt(more-1, 300)) > 0 })
	return r.stream.Status()
}

func (r *rank) held() int {
	r.sink.Lock()
	defer r.sink.Unlock()
	return r.sink.x.Held(r.slot)
}

func TestARestartedEngineIsEmpty(t *testing.T) {
	r := startRank(t, refengine.Config{KV: refengine.KV{PrefixCache: 100}})
	r.follow()
	p := prompts(2)
	r.ask(p[0])
	r.eventually("stored", func() bool { return r.hit(p[0]) > 0 })
	r.engine.Kill()
	r.eventually("noticed", func() bool { return !r.stream.Precise(time.Now()) })
	require.NoError(t, r.engine.Revive())
	r.ask(p[1]) // sequence numbers begin again
	r.eventually("back", func() bool { return r.hit(p[1]) > 0 })
	require.Zero(t, r.hit(p[0]))
	require.True(t, r.stream.Complete())
	r.eventually("up", func() bool { return r.stream.Precise(time.Now()) })
	require.EqualValues(t, 2, r.stream.counters.connects.Load())
	require.Empty(t, r.stream.Status().Failure)
}

// The publisher drops what a slow subscriber does not fetch; the next batch that it does not drop
// shows the gap, and the replay fills it.
func TestASlowSubscriberMissesNothing(t *testing.T) {
	r := startRank(t, refengine.Config{KV: refengine.KV{PrefixCache: 100_000},
		KVEvents: refengine.KVEvents{HWM: 2, Delay: 20 * time.Millisecond}}) // nothing is evicted
	r.follow()
	all := prompts(40)
	for _, p := range all {
		r.ask(p)
	}
	r.eventually("some were sent", func() bool { return r.stream.Status().Batches > 2 })
	more := uint64(100)
	r.eventually("all", func() bool {
		r.ask(reftext.MakePrompt(more, 300))
		more++
		for _, p := range all {
			if r.hit(p) == 0 {
				return false
			}
		}
		return r.stream.Status().GapsReplayed > 0
	})
	require.Zero(t, r.stream.Status().GapsCold)
}

func TestResyncTellsAllAgain(t *testing.T) {
	r := startRank(t, refengine.Config{KV: refengine.KV{PrefixCache: 100}})
	r.follow()
	p := prompts(1)[0]
	r.ask(p)
	r.eventually("stored", func() bool { return r.hit(p) > 0 })
	r.sink.Lock()
	r.sink.x.Reset()
	r.sink.Unlock()
	require.Zero(t, r.hit(p))
	r.stream.Resync()
	r.eventually("again", r.stream.Complete)
	require.Positive(t, r.hit(p))
	r.stream.Close()
	r.stream.Resync()
	require.False(t, r.stream.Complete(), "the sink has lost it, and was not told again")
}

func TestAnEngineThatAnswersAndSaysNothing(t *testing.T) {
	r := startRank(t, refengine.Config{KV: refengine.KV{PrefixCache: 100}})
	r.follow()
	now := time.Now()
	require.True(t, r.stream.Precise(now.Add(time.Hour)), "one that is idle has nothing to say")
	r.stream.ExpectEvent(now)
	r.stream.ExpectEvent(now.Add(20 * time.Second))
	require.True(t, r.stream.Precise(now.Add(30*time.Second-1)))
	require.False(t, r.stream.Precise(now.Add(30*time.Second)))
	all := prompts(1000)
	r.eventually("heard again", func() bool { // a publisher drops what it says before it has read a subscription
		r.ask(all[0])
		all = all[1:]
		return r.stream.Precise(now.Add(time.Hour))
	})
}

// startOdd is a publisher that says what a test wants; nil: it speaks HTTP.
func startOdd(t *testing.T, speak func(conn net.Conn, z *zmq4.Conn)) string {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var wg sync.WaitGroup
	var mu sync.Mutex
	var open []net.Conn
	wg.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			open = append(open, conn)
			mu.Unlock()
			wg.Go(func() {
				defer conn.Close()
				if speak == nil {
					_, _ = io.WriteString(conn, "HTTP/1.1 400 Bad Request\r\n\r\n")
					return
				}
				if z, err := zmq4.Open(conn, null.Security(), zmq4.Pub, nil, true, nil); err == nil {
					if _, err := z.RecvMsg(); err == nil {
						speak(conn, z)
						_, _ = z.RecvMsg() // until it leaves
					}
				}
			})
		}
	})
	t.Cleanup(func() {
		ln.Close()
		mu.Lock()
		for _, conn := range open {
			conn.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
	return ln.Addr().String()
}

func batch(seq uint64, payload []byte) zmq4.Msg {
	return zmq4.NewMsgFrom([]byte("topic"), binary.BigEndian.AppendUint64(nil, seq), payload)
}

func startStream(t *testing.T, events string) (*Stream, *rank) {
	r := &rank{T: t, sink: &shared{x: index.New(index.Config{})}}
	r.slot = r.sink.x.Add("p0/0", 0)
	r.stream = Start(Config{Place: Place{Events: events}, Slot: r.slot, Scope: index.Scope{Model: "m"}, Sink: r.sink,
		ReplayTimeout: 50 * time.Millisecond})
	t.Cleanup(r.stream.Close)
	return r.stream, r
}

func TestGarbageFramesAreCountedAndForgotten(t *testing.T) {
	good := payload(stored(list{1, 2}, nil, list{1, 2, 3, 4}))
	step := make(chan zmq4.Msg)
	addr := startOdd(t, func(_ net.Conn, z *zmq4.Conn) {
		for msg := range step {
			if z.SendMsg(msg) != nil {
				return
			}
		}
	})
	s, r := startStream(t, addr)
	step <- batch(5, good) // a stream may be joined late
	r.eventually("good", func() bool { return r.held() == 2 })
	require.False(t, s.Complete(), "there were five before")
	step <- zmq4.NewMsgFrom([]byte("topic"), []byte("short"), good)
	step <- zmq4.NewMsg([]byte("one frame"))
	r.eventually("counted", func() bool { return s.Status().DecodeErrors == 2 })
	require.Equal(t, 2, r.held(), "they said nothing")
	step <- batch(6, []byte("garbage"))
	r.eventually("cold: it may have been a removal", func() bool { return r.held() == 0 })
	r.eventually("not to be relied on", func() bool { return !s.Precise(time.Now()) })
	step <- batch(7, good)
	r.eventually("good again", func() bool { return r.held() == 2 && s.Precise(time.Now()) })
	step <- batch(9, good)
	r.eventually("a gap without a replay is cold", func() bool { return s.Status().GapsCold == 1 })
	step <- batch(10, payload(m{"type": "AllBlocksCleared"}))
	r.eventually("an empty cache is known whole", s.Complete)
	close(step)
}

func TestAMessageTooLargeEndsTheConnection(t *testing.T) {
	for name, announce := range map[string][]byte{
		"one frame":          append([]byte{flagLong}, binary.BigEndian.AppendUint64(nil, maxMessageBytes+1)...),
		"without end":        append([]byte{flagLong}, binary.BigEndian.AppendUint64(nil, math.MaxUint64)...),
		"in the second part": append(append([]byte{flagMore, 1, 'x'}, flagLong), binary.BigEndian.AppendUint64(nil, maxMessageBytes)...),
		"endless empty ones": bytes.Repeat([]byte{flagMore, 0}, 1<<20),
	} {
		t.Run(name, func(t *testing.T) {
			addr := startOdd(t, func(conn net.Conn, _ *zmq4.Conn) { _, _ = conn.Write(announce) })
			s, r := startStream(t, addr)
			r.eventually("said so", func() bool { return strings.Contains(s.Status().Failure, "16 MiB") })
			r.eventually("dialled again", func() bool { return s.counters.connects.Load() > 1 })
		})
	}
}

func TestWhatIsNoPublisher(t *testing.T) {
	s, r := startStream(t, startOdd(t, nil))
	r.eventually("said so", func() bool { return strings.Contains(s.Status().Failure, "does not speak ZeroMQ") })
	require.False(t, s.Precise(time.Now()))
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ln.Close()
	s, r = startStream(t, ln.Addr().String())
	r.eventually("said so", func() bool { return strings.Contains(s.Status().Failure, "refused") })
}

func TestManyQueuedBatchesAreGivenUp(t *testing.T) {
	q := newQueue()
	for i := range uint64(maxQueued) {
		q.push(message{seq: i})
	}
	items, over, err := q.take()
	require.Len(t, items, maxQueued)
	require.False(t, over)
	require.NoError(t, err)
	for i := range uint64(maxQueued + 2) {
		q.push(message{seq: i})
	}
	items, over, _ = q.take()
	require.True(t, over)
	require.Equal(t, []message{{seq: maxQueued}, {seq: maxQueued + 1}}, items)
	q.push(message{payload: make([]byte, maxQueuedBytes)})
	q.push(message{payload: make([]byte, 1)})
	_, over, _ = q.take()
	require.True(t, over)
}

func TestEndpoint(t *testing.T) {
	require.Equal(t, "10.0.0.5:5559", Endpoint("10.0.0.5", 5557, 2))
	require.Equal(t, "[::1]:5557", Endpoint("::1", 5557, 0))
}
