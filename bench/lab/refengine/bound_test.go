package refengine

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/reftext"
)

// pair is a prefill and a decode engine of a connector by which KV is written.
type pair struct {
	*testing.T
	p, d *Engine
	c    *http.Client
}

// pairOf starts the engines. What is set in shared is set in both.
func pairOf(t *testing.T, shared Config) pair {
	t.Helper()
	p, d := shared, shared
	p.Role, d.Role = Prefill, Decode
	return pair{T: t, p: start(t, p), d: start(t, d), c: client(t)}
}

// pending is a request that may still be under way.
type pending struct {
	stop context.CancelFunc // its client leaves
	got  chan reply
}

// post sends a chat request without waiting for its answer.
func (p pair) post(e *Engine, id, prompt, more string) pending {
	ctx, cancel := context.WithCancel(context.Background())
	p.Cleanup(cancel)
	r := pending{cancel, make(chan reply, 1)}
	go func() {
		r.got <- doContext(ctx, p.c, "POST", e.URLs()[0]+"/v1/chat/completions", chatBody(prompt, more), "X-Request-Id", id)
	}()
	return r
}

// leave has the client leave, and waits until it has.
func (r pending) leave() {
	r.stop()
	<-r.got
}

// stream waits for an answer of status 200 and reads it.
func (p pair) stream(r pending) stream {
	p.Helper()
	got := <-r.got
	require.Equal(p, 200, got.status, "%v %s", got.err, got.body)
	return parseStream(p, got.body)
}

// right says whether a stream is the whole answer to a prompt.
func (p pair) right(prompt string, s stream) bool {
	n, err := reftext.Check(reftext.OfUser(prompt).Answer, 0, s.content)
	return err == nil && n > 0 && s.finish != "" && s.errorMessage == ""
}

// nothingHeld waits until no engine holds anything.
func (p pair) nothingHeld() {
	p.Helper()
	eventually(p, "the engines hold nothing", func() bool {
		a, b := p.p.Stats(), p.d.Stats()
		return a.KVUsed+b.KVUsed+a.Running+b.Running+a.Waiting+b.Waiting == 0 && a.Pins == 0
	})
}

// metaserver takes callbacks as a proxy does: it answers at once, and hands them on.
type metaserver struct {
	url  string
	came chan json.RawMessage
}

func metaserverOf(t *testing.T, answer func(w http.ResponseWriter)) metaserver {
	m := metaserver{came: make(chan json.RawMessage, 100)}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var body json.RawMessage
		if json.NewDecoder(r.Body).Decode(&body) == nil {
			m.came <- body
		}
		if answer != nil {
			answer(w)
		}
	}))
	t.Cleanup(s.Close)
	m.url = s.URL + "/v1/metaserver/0123"
	return m
}

// decodeAt is what a proxy adds to a layerwise decode request.
func (m metaserver) decodeAt(more string) string {
	return fmt.Sprintf(`"stream":true,"kv_transfer_params":{%s"do_remote_decode":false,"do_remote_prefill":true,"metaserver":%q},`, more, m.url)
}

// prefillTo is what a proxy adds to a prefill request: a callback as it came.
func prefillTo(callback json.RawMessage) string {
	return `"stream":false,"max_tokens":1,"kv_transfer_params":` + string(callback) + `,`
}

var layerwise = Config{Connector: AscendLayerwise}

// serve is a right proxy's way with one request of which the decode engine wants KV.
func (p pair) serve(m metaserver, id, prompt string) stream {
	p.Helper()
	d := p.post(p.d, id, prompt, m.decodeAt(""))
	r := <-p.post(p.p, id, prompt, prefillTo(<-m.came)).got
	require.Equal(p, 200, r.status, r.body)
	return p.stream(d)
}

func TestALayerwisePromptIsWrittenIntoItsDecodeEngine(t *testing.T) {
	p := pairOf(t, layerwise)
	m := metaserverOf(t, nil)
	prompt := reftext.MakePrompt(1, 300)
	d := p.post(p.d, "one", prompt, m.decodeAt(""))
	callback := <-m.came
	var told map[string]any
	require.NoError(t, json.Unmarshal(callback, &told))
	require.Equal(t, "chatcmpl-one", told["request_id"])
	require.Equal(t, false, told["do_remote_prefill"])
	require.Equal(t, true, told["do_remote_decode"])
	require.Len(t, told["remote_block_ids"].([]any)[0], 3)
	r := <-p.post(p.p, "one", prompt, prefillTo(callback)).got
	require.Equal(t, 200, r.status, r.body)
	require.Contains(t, r.body, `"kv_transfer_params":null`)
	require.Contains(t, r.body, `"finish_reason":"length"`)
	require.True(t, p.right(prompt, p.stream(d)))
	p.nothingHeld()
	require.Equal(t, []int64{1, 0, 0}, []int64{p.d.Stats().Callbacks, p.d.Stats().LostPushes, p.p.Stats().Leaks})
}

func TestALayerwiseCompletionIsKnownByItsFirstChild(t *testing.T) {
	p := pairOf(t, layerwise)
	m := metaserverOf(t, nil)
	got := make(chan reply, 1)
	body := func(more string) string { return completionBody("a b c", more) }
	go func() {
		got <- do(p.c, "POST", p.d.URLs()[0]+"/v1/completions", body(m.decodeAt("")), "X-Request-Id", "one")
	}()
	callback := <-m.came
	require.Contains(t, string(callback), `"request_id":"cmpl-one-0"`)
	require.Equal(t, 200, do(p.c, "POST", p.p.URLs()[0]+"/v1/completions", body(prefillTo(callback)), "X-Request-Id", "one").status)
	s := parseStream(t, (<-got).body)
	_, err := reftext.Check(reftext.Of("a b c").Answer, 0, s.content)
	require.NoError(t, err)
}

func TestALayerwiseDecodeEngineIsSilentUntilItHasRoom(t *testing.T) {
	p := pairOf(t, Config{Connector: AscendLayerwise, KV: KV{Tokens: 4 * blockSize}})
	m := metaserverOf(t, nil)
	prompt := reftext.MakePrompt(1, 300)
	other := reftext.MakePrompt(2, 300)
	first := p.post(p.d, "full", other, m.decodeAt(""))
	callback := <-m.came // it has the blocks, and waits
	second := p.post(p.d, "one", prompt, m.decodeAt(""))
	eventually(t, "both are there", func() bool { return p.d.Stats().Waiting == 2 })
	eventually(t, "the callback has its answer", func() bool { return p.d.Stats().Callbacks == 1 })
	require.Empty(t, m.came, "the second has no blocks")
	require.Equal(t, 200, (<-p.post(p.p, "full", other, prefillTo(callback)).got).status)
	require.True(t, p.right(other, p.stream(first)))
	require.Equal(t, 200, (<-p.post(p.p, "one", prompt, prefillTo(<-m.came)).got).status)
	require.True(t, p.right(prompt, p.stream(second)))
}

func TestTheStatusOfACallbacksAnswerIsNotLookedAt(t *testing.T) {
	p := pairOf(t, layerwise)
	m := metaserverOf(t, func(w http.ResponseWriter) { w.WriteHeader(http.StatusBadGateway) })
	require.True(t, p.right("a b", p.serve(m, "one", "a b")))
	require.EqualValues(t, 1, p.d.Stats().Callbacks)
	require.Empty(t, m.came, "502 counts as delivered")
}

func TestACallbackThatReachesNobodyIsTriedThreeTimes(t *testing.T) {
	p := pairOf(t, layerwise)
	m := metaserverOf(t, func(http.ResponseWriter) { panic(http.ErrAbortHandler) })
	d := p.post(p.d, "one", "a b", m.decodeAt(""))
	for range 3 {
		<-m.came
	}
	require.Zero(t, p.d.Stats().Callbacks)
	d.leave()
	require.Empty(t, m.came)
}

// A proxy that answers callbacks after the prefill has at most 32 of a rank.
func TestARankHas32CallbacksAtOnce(t *testing.T) {
	p := pairOf(t, layerwise)
	release := make(chan struct{})
	var atOnce, most atomic.Int64
	m := metaserverOf(t, func(http.ResponseWriter) {
		n := atOnce.Add(1)
		for old := most.Load(); n > old && !most.CompareAndSwap(old, n); old = most.Load() {
		}
		<-release
		atOnce.Add(-1)
	})
	var all []pending
	for i := range 40 {
		all = append(all, p.post(p.d, fmt.Sprint("r", i), "a b", m.decodeAt("")))
	}
	for range 32 {
		<-m.came
	}
	eventually(t, "all have blocks", func() bool { return p.d.Stats().Waiting == 40 })
	eventually(t, "32 callbacks are held", func() bool { return atOnce.Load() == 32 })
	close(release)
	for range 8 {
		<-m.came
	}
	require.EqualValues(t, 32, most.Load())
	for _, r := range all {
		r.leave()
	}
}

func TestAPrefillUnderAnotherIDIsLost(t *testing.T) {
	p := pairOf(t, layerwise)
	m := metaserverOf(t, nil)
	d := p.post(p.d, "one", "a b", m.decodeAt(""))
	callback := <-m.came
	require.Equal(t, 200, (<-p.post(p.p, "one-p1", "a b", prefillTo(callback)).got).status, "the prefill engine sees nothing wrong")
	require.EqualValues(t, 2, p.d.Stats().LostPushes)
	require.EqualValues(t, 1, p.d.Stats().Waiting, "and the decode engine waits")
	require.Equal(t, 200, (<-p.post(p.p, "one", "a b", prefillTo(callback)).got).status)
	require.True(t, p.right("a b", p.stream(d)))
}

func TestTwoPrefillsOfOneDecodeMixTheirKV(t *testing.T) {
	p := pairOf(t, layerwise)
	slow := start(t, Config{Role: Prefill, Connector: AscendLayerwise, KV: KV{TransferBase: time.Hour}})
	m := metaserverOf(t, nil)
	d := p.post(p.d, "one", "a b", m.decodeAt(""))
	callback := <-m.came
	first := p.post(slow, "one", "a b", prefillTo(callback))
	eventually(t, "its first worker is done", func() bool { return p.d.Stats().Pushes == 1 })
	require.Equal(t, 200, (<-p.post(p.p, "one", "a b", prefillTo(callback)).got).status)
	require.False(t, p.right("a b", p.stream(d)), "it begins before its KV is complete")
	require.EqualValues(t, 1, p.d.Stats().MixedPushes)
	first.leave()
}

func TestAPrefillThatFailedAfterItBeganMustNotBeRepeatedElsewhere(t *testing.T) {
	for fault, begun := range map[Fault]bool{Reset: true, Internal: true, Hang: true, Busy: false, Throttle: false} {
		t.Run(string(fault), func(t *testing.T) {
			p := pairOf(t, layerwise)
			m := metaserverOf(t, nil)
			failing := start(t, Config{Role: Prefill, Connector: AscendLayerwise, Faults: []Rule{{Fault: fault}}})
			d := p.post(p.d, "one", "a b", m.decodeAt(""))
			callback := <-m.came
			first := p.post(failing, "one", "a b", prefillTo(callback))
			eventually(t, "it fails", func() bool { return failing.Stats().Probes == 1 && (p.d.Stats().Pushes == 1) == begun })
			first.leave()
			require.Equal(t, 200, (<-p.post(p.p, "one", "a b", prefillTo(callback)).got).status)
			require.Equal(t, !begun, p.right("a b", p.stream(d)), "one that refuses has written nothing")
		})
	}
}

func TestALayerwisePrefillWithoutACallbackCrashes(t *testing.T) {
	p := pairOf(t, layerwise)
	require.Equal(t, 500, (<-p.post(p.p, "one", "a b", probeMore).got).status)
	require.EqualValues(t, 1, p.p.Stats().Crashes)
}

func TestACallbackMustReachThePrefillAsItCame(t *testing.T) {
	p := pairOf(t, layerwise)
	m := metaserverOf(t, nil)
	d := p.post(p.d, "one", "a b", m.decodeAt(""))
	changed := strings.Replace(string(<-m.came), `"remote_block_ids":[[0]]`, `"remote_block_ids":[[7]]`, 1)
	require.Equal(t, 200, (<-p.post(p.p, "one", "a b", prefillTo(json.RawMessage(changed))).got).status)
	require.False(t, p.right("a b", p.stream(d)))
	require.EqualValues(t, 1, p.d.Stats().WrongBlocks)
}

func TestDoVirtualDecodesWithoutKV(t *testing.T) {
	p := pairOf(t, layerwise)
	m := metaserverOf(t, nil)
	require.False(t, p.right("a b", p.stream(p.post(p.d, "one", "a b", m.decodeAt(`"do_virtual":true,`)))))
	require.Empty(t, m.came)
}

// The blocks of a client that left are lost until somebody prefills for it.
func TestBlocksOfAnAbortedWaitStayUntilThePrefillEnds(t *testing.T) {
	for _, connector := range []Connector{AscendLayerwise, NIXLPush} {
		t.Run(string(connector), func(t *testing.T) {
			p := pairOf(t, Config{Connector: connector, KV: KV{HoldTimeout: 100 * time.Millisecond}})
			m := metaserverOf(t, nil)
			at, more := m.decodeAt(""), probeMore
			if connector == NIXLPush {
				at = p.decodeBy(p.coordinates(), "one")
			}
			d := p.post(p.d, "one", "a b", at)
			if connector == AscendLayerwise {
				more = prefillTo(<-m.came)
			} else {
				eventually(t, "it has blocks", func() bool { return p.d.Stats().KVUsed > 0 })
			}
			d.leave()
			eventually(t, "they stay", func() bool { return p.d.Stats().Ranks[0].Stranded == blockSize })
			require.Equal(t, 200, (<-p.post(p.p, "one", "a b", more).got).status)
			p.nothingHeld()
			eventually(t, "nothing is lost any more", func() bool { return p.d.Stats().Ranks[0].Stranded == 0 })
		})
	}
}

func TestAWholePromptInTheCacheCallsBackWithoutBlocks(t *testing.T) {
	p := pairOf(t, Config{Connector: AscendLayerwise, KV: KV{PrefixCache: 100}})
	m := metaserverOf(t, nil)
	prompt := reftext.MakePrompt(1, 2*blockSize+1)
	require.True(t, p.right(prompt, p.serve(m, "one", prompt)))
	s := p.stream(p.post(p.d, "two", prompt, m.decodeAt("")))
	require.True(t, p.right(prompt, s), "it waits for nothing")
	require.Contains(t, string(<-m.came), `"remote_block_ids":[]`)
}

func TestFaultsOfACallback(t *testing.T) {
	const prompt = "a b"
	for _, row := range []struct {
		name  string
		rule  Rule
		check func(t *testing.T, p pair, m metaserver, d pending)
	}{
		{"it never comes", Rule{Fault: NoCallback}, func(t *testing.T, p pair, m metaserver, d pending) {
			eventually(t, "the request has its blocks", func() bool { return p.d.Stats().KVUsed > 0 })
			require.Empty(t, m.came)
			d.leave()
		}},
		{"it comes twice", Rule{Fault: CallbackTwice}, func(t *testing.T, p pair, m metaserver, d pending) {
			first := <-m.came
			require.Equal(t, first, <-m.came)
			require.Equal(t, 200, (<-p.post(p.p, "one", prompt, prefillTo(first)).got).status)
			require.True(t, p.right(prompt, p.stream(d)))
		}},
		{"it comes late", Rule{Fault: CallbackLate, DelayMS: 20}, func(t *testing.T, p pair, m metaserver, d pending) {
			require.Equal(t, 200, (<-p.post(p.p, "one", prompt, prefillTo(<-m.came)).got).status)
			require.True(t, p.right(prompt, p.stream(d)))
		}},
		{"it names another host", Rule{Fault: CallbackBadHost}, func(t *testing.T, p pair, m metaserver, d pending) {
			require.Contains(t, string(<-m.came), `"remote_host":"203.0.113.7"`)
			d.leave()
		}},
		{"its id is cut", Rule{Fault: CallbackShortID}, func(t *testing.T, p pair, m metaserver, d pending) {
			callback := <-m.came
			require.Contains(t, string(callback), `"request_id":"cha"`)
			require.Equal(t, 200, (<-p.post(p.p, "one", prompt, prefillTo(callback)).got).status)
			require.True(t, p.right(prompt, p.stream(d)), "the engines know the request by its header")
		}},
		{"it needs nothing", Rule{Fault: CallbackEmpty}, func(t *testing.T, p pair, m metaserver, d pending) {
			callback := <-m.came
			require.Contains(t, string(callback), `"remote_block_ids":[]`)
			require.True(t, p.right(prompt, p.stream(d)))
			require.Equal(t, 200, (<-p.post(p.p, "one", prompt, prefillTo(callback)).got).status, "wasted work")
			require.EqualValues(t, 2, p.d.Stats().LostPushes)
		}},
	} {
		t.Run(row.name, func(t *testing.T) {
			p := pairOf(t, layerwise)
			m := metaserverOf(t, nil)
			require.NoError(t, p.d.SetFaults(row.rule))
			row.check(t, p, m, p.post(p.d, "one", prompt, m.decodeAt("")))
		})
	}
}

func TestADoneThatIsLostLeavesTheDecodeEngineWaiting(t *testing.T) {
	p := pairOf(t, layerwise)
	m := metaserverOf(t, nil)
	require.NoError(t, p.p.SetFaults(Rule{Fault: DoneLost}))
	d := p.post(p.d, "one", "a b", m.decodeAt(""))
	callback := <-m.came
	require.Equal(t, 200, (<-p.post(p.p, "one", "a b", prefillTo(callback)).got).status)
	require.EqualValues(t, 1, p.d.Stats().Waiting)
	require.NoError(t, p.p.SetFaults())
	other := start(t, Config{Role: Prefill, Connector: AscendLayerwise})
	require.Equal(t, 200, (<-p.post(other, "one", "a b", prefillTo(callback)).got).status)
	require.False(t, p.right("a b", p.stream(d)), "a second prefill engine completes the count, not the KV")
}

// That a request waits for ever after FAILED is inferred from two sources [?].
func TestInferredAFailedPrefillLeavesTheDecodeEngineWaiting(t *testing.T) {
	p := pairOf(t, layerwise)
	m := metaserverOf(t, nil)
	require.NoError(t, p.p.SetFaults(Rule{Fault: FailedSent}))
	d := p.post(p.d, "one", "a b", m.decodeAt(""))
	require.Equal(t, 200, (<-p.post(p.p, "one", "a b", prefillTo(<-m.came)).got).status)
	require.EqualValues(t, 1, p.d.Stats().Waiting)
	d.leave()
	eventually(t, "its blocks are lost", func() bool { return p.d.Stats().Ranks[0].Stranded == blockSize })
}

// coordinates are what any answer of a NIXL prefill engine says about it.
func (p pair) coordinates() map[string]any {
	p.Helper()
	var got map[string]any
	require.NoError(p, json.Unmarshal(probe(p, p.c, p.p, "to learn from"), &got))
	require.Equal(p, "push", got["transfer_mode"])
	return got
}

// decodeBy is what a proxy adds to the decode request of a prefill engine with those coordinates.
func (p pair) decodeBy(c map[string]any, id string) string {
	return fmt.Sprintf(`"stream":true,"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":%q,"remote_host":%q,`+
		`"remote_port":%v,"tp_size":1,"pp_size":1,"remote_request_id":%q},`, c["remote_engine_id"], c["remote_host"], c["remote_port"], "chatcmpl-"+id)
}

func TestNIXLWritesWhenItHasBothInEitherOrder(t *testing.T) {
	p := pairOf(t, Config{Connector: NIXLPush})
	c := p.coordinates()
	prompt := reftext.MakePrompt(3, 300)

	d := p.post(p.d, "decode-first", prompt, p.decodeBy(c, "decode-first"))
	eventually(t, "it has blocks", func() bool { return p.d.Stats().KVUsed > 0 })
	require.Equal(t, 200, (<-p.post(p.p, "decode-first", prompt, probeMore).got).status)
	require.True(t, p.right(prompt, p.stream(d)))

	r := <-p.post(p.p, "late", prompt, probeMore).got
	require.Equal(t, 200, r.status)
	d = p.post(p.d, "late", prompt, decodeMore(handoffIn(t, r.body), `"stream":true,`))
	require.True(t, p.right(prompt, p.stream(d)), "a finished prefill waits for its decode engine")
	require.EqualValues(t, 2, p.p.Stats().Pulls)
	require.Equal(t, 1, p.p.Stats().Pins, "what taught the coordinates waits for its lease to end")
}

func TestNIXLDoesNotFindAnotherID(t *testing.T) {
	p := pairOf(t, Config{Connector: NIXLPush, KV: KV{HoldTimeout: 50 * time.Millisecond}})
	r := <-p.post(p.p, "one-p1", "a b", probeMore).got
	d := p.post(p.d, "one-d1", "a b", decodeMore(handoffIn(t, r.body), `"stream":true,`))
	eventually(t, "the lease ends", func() bool { return p.p.Stats().Leaks == 1 })
	require.EqualValues(t, 1, p.d.Stats().Waiting, "the decode engine waits")
	d.leave()
}

func TestNIXLGivesARepeatedIDTheOthersText(t *testing.T) {
	p := pairOf(t, Config{Connector: NIXLPush})
	r := <-p.post(p.p, "one", "a b", probeMore).got
	require.True(t, p.right("a b", p.stream(p.post(p.d, "one", "a b", decodeMore(handoffIn(t, r.body), `"stream":true,`)))))
	r = <-p.post(p.p, "one", "c d e", probeMore).got
	s := p.stream(p.post(p.d, "one", "c d e", decodeMore(handoffIn(t, r.body), `"stream":true,`)))
	require.False(t, p.right("c d e", s))
	require.True(t, p.right("a b", s), "another client's answer")
	require.EqualValues(t, 1, p.p.Stats().Replays)
}

func TestNIXLWritesNothingAfterTheLeaseOrToAnotherLife(t *testing.T) {
	p := pairOf(t, Config{Connector: NIXLPush, KV: KV{HoldTimeout: 20 * time.Millisecond}})
	r := <-p.post(p.p, "late", "a b", probeMore).got
	eventually(t, "the lease ends", func() bool { return p.p.Stats().Leaks == 1 })
	late := p.post(p.d, "late", "a b", decodeMore(handoffIn(t, r.body), `"stream":true,`))
	c := p.coordinates()
	p.p.Kill()
	require.NoError(t, p.p.Revive())
	old := p.post(p.d, "old", "a b", p.decodeBy(c, "old"))
	require.Equal(t, 200, (<-p.post(p.p, "old", "a b", probeMore).got).status)
	eventually(t, "its lease ends", func() bool { return p.p.Stats().Leaks >= 2 })
	require.EqualValues(t, 2, p.d.Stats().Waiting, "no watchdog ends them")
	late.leave()
	old.leave()
}

// Each fault of these hand-offs is one that a rule can name, and does nothing elsewhere.
func TestFaultsOfBoundRequestsDoNothingToOthers(t *testing.T) {
	p := pairOf(t, Config{})
	for _, name := range BoundFaultNames() {
		if Fault(name) == TransferFails { // it concerns all hand-offs
			continue
		}
		require.NoError(t, p.d.SetFaults(Rule{Fault: Fault(name), DelayMS: 5}))
		require.NoError(t, p.p.SetFaults(Rule{Fault: Fault(name), DelayMS: 5}))
		kv := probe(t, p.c, p.p, name)
		require.True(t, p.right(name, p.stream(p.post(p.d, "d"+name, name, decodeMore(kv, `"stream":true,`)))), name)
	}
}
