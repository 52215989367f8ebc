package gateway_test

import (
	"cmp"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

var update = flag.Bool("update", false, "write the table of docs/failures.md")

// The phases of a request's life, and who may fail in each.
const (
	inChoice   = "prefill choice"
	inProbe    = "probe"
	inPool     = "pooled"
	dispatched = "dispatched, before the response head"
	opened     = "after the 200, before the first event"
	streaming  = "streaming"
	finishing  = "finishing"
)

var phases = []struct{ name, about string }{
	{inChoice, "The request waits in the arrival queue. No engine knows of it."},
	{inProbe, "A prefill engine computes the prompt. A reset on a kept-alive connection that had ended unseen is no attempt, and no engine is blamed: a new prefill follows, and the request uses only new connections from then on. It is sent again as it is if none of its bytes was written."},
	{inPool, "The hand-off waits for a decode rank. The prefill engine holds its KV. No call is under way."},
	{dispatched, "A decode engine was sent the request and has not answered. A connection that had ended unseen is treated as for a probe. If the connection was refused, the engine has not read the hand-off, and another rank can use it. In all other cases the engine may have read it, so evenkeel does not use it again. With `reject_releases`, which vLLM has from 0.25 on, a 429, 500 or 503 releases its KV tokens at once."},
	{opened, "The decode engine has taken the hand-off and pulls the KV. The client has received nothing."},
	{streaming, "The client has part of the answer. For an answer that is not streamed the rows are the same, but the client has nothing of it yet: where such an answer cannot go on in the middle, it begins again."},
	{finishing, "The last token has been sent. The end has not."},
}

var faultsInOrder = []string{"refused", "reset", "timeout", "4xx", "429", "500", "503", "garbage", "wrong content type", "error event",
	"missing finish", "silent end", "hang",
	"restart", "client gone", "deadline", "drain"}

// What is tried again, and where.
const (
	nothing     = "nothing"
	sameHandoff = "the same hand-off on another rank"
	elsewhere   = "a new prefill on another engine"
	both        = "a new prefill, and decode on another rank"
	resumed     = "the rest of the answer, after a new prefill (tiers 0 to 3 below)"
	waits       = "it keeps waiting"
)

// What becomes of the KV on the prefill engine and of its budget. Slots, places
// in the pool and a key's share are given back at once, always.
const (
	none       = "nothing is held"
	atOnce     = "KV tokens at once"
	firstEvent = "KV tokens with the first event"
	drained    = "KV tokens when the hand-off is discarded: one token is decoded and thrown away"
	holds      = "KV tokens of the failed attempt at the hold timeout"
)

// cell is one fault in one phase, and what must come of it. The table in
// docs/failures.md is written from these, and each is run.
type cell struct {
	phase, fault string
	never        string // why there is nothing to do or to see; the rest is empty then

	rule  refengine.Rule // the fault, on the engine of the phase's side
	other string         // what the client gets while another engine is well
	alone string         // and when all engines of the side have the fault; empty: not another thing
	again string         // what is tried again
	kv    string         // what is released when

	attempts int   // while another engine is well
	probes   int64 // that engines got then; not looked at with act
	setup    func(*options)
	act      func(*cell, *cluster, *request) // in place of rule
}

// as says that a fault is the same as another one in its phase.
func as(fault string) string { return "the same as " + fault }

const (
	noCall = "cannot happen: no call is under way"
	right  = "a right answer"
)

func cells() []cell {
	rule := func(f refengine.Fault, phase string) refengine.Rule { return refengine.Rule{Fault: f, Phase: phase} }
	after := func(f refengine.Fault, phase string) refengine.Rule {
		return refengine.Rule{Fault: f, Phase: phase, AfterTokens: 2}
	}
	whole := func(f refengine.Fault, phase string) refengine.Rule {
		return refengine.Rule{Fault: f, Phase: phase, AfterTokens: 16}
	}
	head := "cannot be seen before the head of the answer"
	past := "cannot happen: the engine has answered 200 already"
	two := func(phase string, atP, atD bool) []cell { // of the phases before an answer
		side, again, lost, kv, lostKV := "decode", both, both, drained, drained
		if atP {
			side, again, lost, kv, lostKV = "prefill", elsewhere, elsewhere, atOnce, holds
		}
		unavailable, failed, timeout := "503 `"+side+"_unavailable`", "502 `"+side+"_failed`", "504 `"+side+"_timeout`"
		all := []cell{
			{fault: "refused", other: right, alone: unavailable, again: again, kv: kv, attempts: 2, probes: 1, act: kill},
			{fault: "reset", rule: rule(refengine.Reset, ""), other: right, alone: failed, again: lost, kv: lostKV, attempts: 2, probes: 2},
			{fault: "timeout", rule: rule(refengine.Hang, ""), other: right, alone: timeout, again: lost, kv: lostKV, attempts: 2, probes: 2},
			{fault: "4xx", rule: rule(refengine.Reject, ""), other: "400, as the engine said it", again: nothing, kv: kv, attempts: 1, probes: 1},
			{fault: "429", rule: refengine.Rule{Fault: refengine.Throttle, RetryAfter: 1}, other: right, alone: "429, as the engine said it", again: again, kv: kv, attempts: 2, probes: 2},
			{fault: "500", rule: rule(refengine.Internal, ""), other: right, alone: failed, again: again + ", once", kv: kv, attempts: 2, probes: 2},
			{fault: "503", rule: rule(refengine.Busy, ""), other: right, alone: unavailable, again: again, kv: kv, attempts: 2, probes: 2},
		}
		if atD {
			all[0].again, all[0].kv = sameHandoff, "kept for the next rank"
			all[5].kv = drained + ". After a second 500 no other engine gets the request, and its KV tokens are free at the hold timeout"
		}
		for i := range all {
			all[i].phase = phase
		}
		return all
	}
	var all []cell
	for _, f := range faultsInOrder[:13] {
		all = append(all, cell{phase: inChoice, fault: f, never: noCall}, cell{phase: inPool, fault: f, never: noCall})
	}
	all = append(all,
		cell{phase: inChoice, fault: "restart", other: right, again: waits + " for another engine", kv: none, attempts: 1, probes: 1,
			act: whileQueued((*cluster).killPrefill)},
		cell{phase: inChoice, fault: "client gone", other: "", again: nothing, kv: none, attempts: 1, act: whileQueued(nil)},
		cell{phase: inChoice, fault: "deadline", other: "503 `queue_timeout`", again: nothing, kv: none, attempts: 1, act: whileQueued(nil),
			setup: func(o *options) { o.with(func(c *config.Config) { c.Prefill.Queue.Timeout = time.Second }) }},
		cell{phase: inChoice, fault: "drain", other: right, again: waits + " for another engine", kv: none, attempts: 1, probes: 1,
			act: whileQueued((*cluster).drainPrefill)},

		cell{phase: inPool, fault: "restart", other: right, again: waits + "; if the prefill engine died, decode fails, and then " + both,
			kv: firstEvent, attempts: 1, probes: 1, act: whilePooled((*cluster).killDecode)},
		cell{phase: inPool, fault: "client gone", other: "", again: nothing, kv: drained, attempts: 1, probes: 1, act: whilePooled(nil)},
		cell{phase: inPool, fault: "deadline", other: "503 `pool_timeout`", again: nothing, kv: drained, attempts: 1, probes: 1,
			act:   whilePooled(nil),
			setup: func(o *options) { o.profile.KVHoldTimeout, o.profile.HoldMargin = 122*time.Second, 2*time.Minute }},
		cell{phase: inPool, fault: "drain", other: right, again: waits + " for another rank", kv: firstEvent, attempts: 1, probes: 1,
			act: whilePooled((*cluster).drainDecode)},
	)
	all = append(all, two(inProbe, true, false)...)
	all = append(all,
		cell{phase: inProbe, fault: "garbage", rule: rule(refengine.Garbage, ""), other: right, alone: "502 `prefill_failed`", again: elsewhere,
			kv: holds, attempts: 2, probes: 2},
		cell{phase: inProbe, fault: "wrong content type",
			never: "does not matter: only the body counts, and a body with a hand-off is a good answer"},
		cell{phase: inProbe, fault: "error event", rule: rule(refengine.Error200, ""), other: right, alone: "502 `prefill_failed`",
			again: elsewhere, kv: holds, attempts: 2, probes: 2},
		cell{phase: inProbe, fault: "missing finish", rule: rule(refengine.NullHandoff, ""), other: right, alone: "502 `prefill_failed`",
			again: elsewhere, kv: atOnce, attempts: 2, probes: 2},
		cell{phase: inProbe, fault: "silent end", never: as("reset") + ": the answer has a length"},
		cell{phase: inProbe, fault: "hang", never: as("timeout") + ": the answer comes in one piece"},
		cell{phase: inProbe, fault: "restart", other: right, again: elsewhere, kv: holds + ", or when the restart is noticed", attempts: 2,
			probes: 2, act: whileProbed((*cluster).killPrefill)},
		cell{phase: inProbe, fault: "client gone", other: "", again: nothing,
			kv: "KV tokens at once: the engine aborts with the connection; what ends within 100 ms is discarded", attempts: 1, probes: 1,
			act: whileProbed(nil)},
		cell{phase: inProbe, fault: "deadline", never: as("timeout") + " (`limits.probe_timeout`)"},
		cell{phase: inProbe, fault: "drain", other: right, again: elsewhere + ", at the drain's deadline", kv: atOnce, attempts: 2, probes: 2,
			act: whileProbed((*cluster).drainPrefill)},
	)
	all = append(all, two(dispatched, false, true)...)
	all = append(all,
		cell{phase: dispatched, fault: "garbage", never: head},
		cell{phase: dispatched, fault: "wrong content type", never: head},
		cell{phase: dispatched, fault: "error event", never: head},
		cell{phase: dispatched, fault: "missing finish", never: head},
		cell{phase: dispatched, fault: "silent end", never: head},
		cell{phase: dispatched, fault: "hang", never: as("timeout")},
		cell{phase: dispatched, fault: "restart", never: as("reset")},
		cell{phase: dispatched, fault: "client gone", never: "the same as after the 200, which the next table has"},
		cell{phase: dispatched, fault: "deadline", never: "a hand-off past its deadline is not sent; the request gets " + both},
		cell{phase: dispatched, fault: "drain", never: "the same as after the 200, which the next table has"},
	)
	for _, f := range []string{"refused", "4xx", "429", "500", "503"} {
		why := past
		if f == "refused" {
			why = "cannot happen: the connection is open"
		}
		all = append(all, cell{phase: opened, fault: f, never: why}, cell{phase: streaming, fault: f, never: why},
			cell{phase: finishing, fault: f, never: why})
	}
	failed := "502 `decode_failed`"
	all = append(all,
		cell{phase: opened, fault: "reset", rule: rule(refengine.Reset, refengine.PhaseAfterHeaders), other: right, alone: failed, again: both,
			kv: drained, attempts: 2, probes: 2},
		cell{phase: opened, fault: "timeout", rule: rule(refengine.Hang, refengine.PhaseAfterHeaders), other: right,
			alone: "504 `decode_timeout`", again: both, kv: drained, attempts: 2, probes: 2},
		cell{phase: opened, fault: "garbage", rule: rule(refengine.Garbage, ""), other: right, alone: failed, again: both, kv: drained,
			attempts: 2, probes: 2},
		cell{phase: opened, fault: "wrong content type", rule: rule(refengine.WrongType, ""), other: right, alone: failed, again: both,
			kv: drained, attempts: 2, probes: 2},
		cell{phase: opened, fault: "error event", rule: rule(refengine.ErrorEvent, ""), other: right, alone: failed, again: both + ", once",
			kv: drained, attempts: 2, probes: 2},
		cell{phase: opened, fault: "missing finish", rule: rule(refengine.MissingFinish, ""), never: as("silent end")},
		cell{phase: opened, fault: "silent end", rule: rule(refengine.SilentEnd, ""), other: right, alone: failed, again: both, kv: drained,
			attempts: 2, probes: 2},
		cell{phase: opened, fault: "hang", never: as("timeout") + ": comments do not count as events"},
		cell{phase: opened, fault: "restart", never: as("reset")},
		cell{phase: opened, fault: "client gone", other: "", again: nothing,
			kv: firstEvent + "; until then the connection stays open and the slot is taken", attempts: 1, probes: 1, act: whileOpened(nil)},
		cell{phase: opened, fault: "deadline", never: as("timeout") + " (`first_event_timeout`)"},
		cell{phase: opened, fault: "drain", other: right, again: "nothing until its first event or `first_event_timeout`; then " + resumed,
			kv: firstEvent, attempts: 2, probes: 2, act: whileOpened((*cluster).drainDecode)},

		cell{phase: streaming, fault: "reset", rule: after(refengine.Reset, refengine.PhaseMidStream), other: right,
			alone: "event `upstream_broken`", again: resumed, kv: firstEvent, attempts: 2, probes: 2},
		cell{phase: streaming, fault: "timeout", never: as("hang")},
		cell{phase: streaming, fault: "garbage", never: "the same as missing finish: the bytes are not an event"},
		cell{phase: streaming, fault: "wrong content type", never: past},
		cell{phase: streaming, fault: "error event", rule: after(refengine.ErrorEvent, ""), other: right, alone: "event of the engine",
			again: resumed + ", once", kv: firstEvent, attempts: 2, probes: 2},
		cell{phase: streaming, fault: "missing finish", rule: after(refengine.MissingFinish, ""), other: right,
			alone: "event `upstream_incomplete`", again: resumed, kv: firstEvent, attempts: 2, probes: 2},
		cell{phase: streaming, fault: "silent end", rule: after(refengine.SilentEnd, ""), other: right, alone: "event `upstream_incomplete`",
			again: resumed, kv: firstEvent, attempts: 2, probes: 2},
		cell{phase: streaming, fault: "hang", rule: after(refengine.Hang, refengine.PhaseMidStream), other: right,
			alone: "event `upstream_broken`", again: resumed, kv: firstEvent, attempts: 2, probes: 2},
		cell{phase: streaming, fault: "restart", other: right, again: resumed, kv: firstEvent, attempts: 2, probes: 2,
			act: whileStreaming((*cluster).killDecode)},
		cell{phase: streaming, fault: "client gone", other: "", again: nothing, kv: firstEvent + "; the slot when the engine has noticed",
			attempts: 1, probes: 1, act: whileStreaming(nil)},
		cell{phase: streaming, fault: "deadline", never: as("hang") + ": the only deadline is `limits.event_timeout` between two events"},
		cell{phase: streaming, fault: "drain", other: right, again: resumed + ", at the drain's deadline", kv: firstEvent, attempts: 2, probes: 2,
			act: whileStreaming((*cluster).drainDecode)},

		cell{phase: finishing, fault: "reset", rule: whole(refengine.Reset, refengine.PhaseMidStream), other: right,
			again: "nothing: the proxy writes the end", kv: firstEvent, attempts: 1, probes: 1},
		cell{phase: finishing, fault: "timeout", never: as("hang")},
		cell{phase: finishing, fault: "garbage", never: "does not matter: after a finish_reason nothing is read as part of the answer"},
		cell{phase: finishing, fault: "wrong content type", never: past},
		cell{phase: finishing, fault: "error event", rule: whole(refengine.ErrorEvent, ""), other: right,
			again: "nothing: the proxy writes the end", kv: firstEvent, attempts: 1, probes: 1},
		cell{phase: finishing, fault: "missing finish", rule: rule(refengine.MissingDone, ""), other: right, again: nothing, kv: firstEvent,
			attempts: 1, probes: 1},
		cell{phase: finishing, fault: "silent end", rule: whole(refengine.SilentEnd, ""), other: right, again: nothing, kv: firstEvent,
			attempts: 1, probes: 1},
		cell{phase: finishing, fault: "hang", rule: whole(refengine.Hang, refengine.PhaseMidStream), other: right,
			again: "nothing: the proxy writes the end", kv: firstEvent, attempts: 1, probes: 1},
		cell{phase: finishing, fault: "restart", never: as("reset")},
		cell{phase: finishing, fault: "client gone", never: "the same as while streaming"},
		cell{phase: finishing, fault: "deadline", never: as("hang")},
		cell{phase: finishing, fault: "drain", never: "cannot happen: the answer ends before any deadline"},
	)
	return all
}

func (o *options) with(change func(*config.Config)) {
	before := o.configure
	o.configure = func(c *config.Config) { before(c); change(c) }
}

// table is what docs/failures.md shows of the cells: a row for each that is run, and a
// list of the others by why they have none.
func table(all []cell) string {
	var b strings.Builder
	for _, p := range phases {
		fmt.Fprintf(&b, "### %s\n\n%s\n\n", strings.ToUpper(p.name[:1])+p.name[1:], p.about)
		fmt.Fprintf(&b, "| fault | the client gets | and if no other engine works | tried again | released |\n|---|---|---|---|---|\n")
		var reasons []string
		faults := map[string][]string{}
		for _, f := range faultsInOrder {
			for _, c := range all {
				switch {
				case c.phase != p.name || c.fault != f:
				case c.never != "":
					if faults[c.never] == nil {
						reasons = append(reasons, c.never)
					}
					faults[c.never] = append(faults[c.never], f)
				default:
					fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", f, cmp.Or(c.other, "nothing: it has left"), c.alone, c.again, c.kv)
				}
			}
		}
		b.WriteString("\nFaults without a row:\n\n")
		for _, why := range reasons {
			fmt.Fprintf(&b, "- %s: %s\n", strings.Join(faults[why], ", "), why)
		}
		b.WriteString("\n")
	}
	return b.String()
}

const (
	tableBegins = "<!-- written by go test ./gateway -run TestTheFailureTable -update -->\n\n"
	tableEnds   = "<!-- end -->\n"
)

// Every fault has its cell in every phase, and the document says what they say.
func TestTheFailureTable(t *testing.T) {
	all := cells()
	seen := map[string]int{}
	for _, c := range all {
		seen[c.phase+c.fault]++
	}
	for _, p := range phases {
		for _, f := range faultsInOrder {
			require.Equal(t, 1, seen[p.name+f], "%s, %s", p.name, f)
		}
	}
	require.Len(t, all, len(phases)*len(faultsInOrder))
	const file = "../docs/failures.md"
	doc, err := os.ReadFile(file)
	require.NoError(t, err)
	before, rest, ok := strings.Cut(string(doc), tableBegins)
	require.True(t, ok, "the table's place")
	_, behind, ok := strings.Cut(rest, tableEnds)
	require.True(t, ok, "the table's end")
	want := before + tableBegins + table(all) + tableEnds + behind
	if *update {
		require.NoError(t, os.WriteFile(file, []byte(want), 0o644)) //nolint:gosec // a document
	}
	require.Equal(t, want, string(doc), "go test ./gateway -run TestTheFailureTable -update writes it")
}

// Each cell, over real sockets, streamed and not.
func TestEveryCellOfTheFailureTable(t *testing.T) {
	t.Parallel()
	for _, c := range cells() {
		if c.never != "" {
			continue
		}
		for _, stream := range []bool{true, false} {
			mode := map[bool]string{true: "streamed", false: "not streamed"}[stream]
			t.Run(c.phase+", "+c.fault+", "+mode, func(t *testing.T) {
				t.Parallel()
				c.run(t, stream, 2)
			})
			if c.alone != "" {
				t.Run(c.phase+", "+c.fault+", alone, "+mode, func(t *testing.T) {
					t.Parallel()
					c.run(t, stream, 1)
				})
			}
		}
	}
}

func (c *cell) atPrefill() bool { return c.phase == inChoice || c.phase == inProbe }

// run lets a request meet the cell's fault, with so many engines on each side.
func (c cell) run(t *testing.T, stream bool, engines int) {
	o := options{
		prefill: []refengine.Config{{}, {}}[:engines], decode: []refengine.Config{{}, {}}[:engines], dirty: true,
		profile: mooncake.Profile{RejectReleases: new(false), FirstEventTimeout: patience},
	}
	o.configure = turns
	if c.rule.Fault == refengine.Hang { // the phase's own limit
		const limit = 2 * time.Second
		switch c.phase {
		case inProbe:
			o.with(func(cfg *config.Config) { cfg.Limits.ProbeTimeout = limit })
		case dispatched, opened:
			o.profile.FirstEventTimeout = limit
		default:
			o.with(func(cfg *config.Config) { cfg.Limits.EventTimeout = limit })
		}
	}
	c.prepare(&o)
	k := start(t, o)
	k.allUp()
	q := &request{cluster: k, stream: stream, chat: c.phase != streaming && c.phase != finishing && c.fault != "drain", then: func() {}}
	q.sent, q.leave = context.WithCancel(t.Context())
	defer q.leave()
	var bad []*refengine.Engine
	switch {
	case c.act != nil:
		c.act(&c, k, q)
	default:
		bad = k.Decode[:1]
		if c.atPrefill() {
			bad = k.Prefill[:1]
		}
		rules := []refengine.Rule{c.rule}
		if c.phase == streaming || c.phase == finishing {
			rules = append(rules, slow)
		}
		for _, e := range bad {
			require.NoError(t, e.SetFaults(rules...))
		}
		q.send()
	}
	got, before := q.outcome(), int64(0)
	for len(bad) > 0 && bad[0].Stats().Probes+bad[0].Stats().Decodes == 0 { // it was another's turn
		before = k.probes()
		q.send()
		got = q.outcome()
	}
	probes := k.probes() - before
	q.then()
	want := c.other
	if engines == 1 {
		want = c.alone
	}
	if !stream { // nothing of it is out: what the event would say is the answer
		if code, ok := strings.CutPrefix(want, "event "); ok {
			want = "502 " + code
		}
	}
	require.Equal(t, want, got)
	if engines == 1 {
		return
	}
	rec := q.record()
	if c.fault == "restart" || c.fault == "refused" { // when the proxy learns that an engine is down decides about one more, or one less
		require.InDelta(t, c.attempts, rec.Attempts, 1, "attempts")
	} else {
		require.Equal(t, c.attempts, rec.Attempts, "attempts")
	}
	if c.phase == inChoice { // the KV that is charged is another request's
		if c.other != right {
			require.EqualValues(t, 1, probes, "no engine saw it")
		}
		return
	}
	if c.act == nil {
		require.Equal(t, c.probes, probes, "probes")
	}
	charged := func() (n int64) {
		for _, p := range k.gw.Status(t.Context()).Prefill {
			n += p.KVTokens
		}
		return n
	}
	switch {
	case strings.HasPrefix(c.kv, holds):
		k.settled(true)
		require.Positive(t, charged(), "until the engine's hold timeout")
	default:
		k.Eventually("nothing is charged", func() bool { return charged() == 0 })
	}
	if c.kv == drained {
		require.EqualValues(t, 1, k.Metric(`evenkeel_drains_total{outcome="drained"}`))
	}
}

// request is the one whose fate the cell tells.
type request struct {
	*cluster
	stream, chat bool
	sent         context.Context
	leave        context.CancelFunc
	prompt       string
	then         func() // once it is answered
	id           string
	got          chan reply
}

func (q *request) send() {
	q.prompt = "the one that counts"
	more := `"max_tokens":16,`
	if q.stream {
		more += `"stream":true,`
	}
	path, body := refclient.CompletionPath, completion(q.prompt, more)
	if q.chat {
		path, body = refclient.ChatPath, chat(q.prompt, more)
	}
	q.got = make(chan reply, 1)
	go func() {
		req, err := http.NewRequestWithContext(q.sent, http.MethodPost, q.URL+path, strings.NewReader(body))
		if err != nil {
			q.got <- reply{Err: err}
			return
		}
		q.got <- q.Do(req)
	}()
}

// outcome is what its client got, in the words of the table.
func (q *request) outcome() string {
	q.Helper()
	var r reply
	select {
	case r = <-q.got:
	case <-time.After(2 * patience):
		require.Fail(q, "no answer")
	}
	if q.sent.Err() != nil {
		return ""
	}
	require.NoError(q, r.Err)
	q.id = r.Header.Get("X-Request-Id")
	key := reftext.Of(q.prompt).Answer
	if q.chat {
		key = reftext.OfUser(q.prompt).Answer
	}
	want := min(16, reftext.NaturalLength(key))
	switch {
	case r.Status != http.StatusOK && strings.Contains(r.Body, "BadRequestError"), r.Status == http.StatusTooManyRequests:
		return fmt.Sprintf("%d, as the engine said it", r.Status)
	case r.Status != http.StatusOK:
		var e struct{ Error struct{ Code any } }
		require.NoError(q, json.Unmarshal([]byte(r.Body), &e), r.Body)
		if code := fmt.Sprint(e.Error.Code); code != "500" {
			return fmt.Sprintf("%d `%s`", r.Status, code)
		}
		return fmt.Sprintf("%d of the engine", r.Status)
	case !q.stream:
		require.Equal(q, want, refclient.RightText(q.T, key, whole(q.T, r.Body)[0]))
		return right
	}
	got := read(q.T, r.Body)
	require.True(q, got.Done)
	n := refclient.RightText(q.T, key, got.Text[0])
	switch got.Fail {
	case "":
		require.Equal(q, want, n)
		require.NotEmpty(q, got.Finish[0])
		return right
	case "500":
		return "event of the engine"
	}
	return "event `" + got.Fail + "`"
}

// record is its line in the request log.
func (q *request) record() (r record) {
	q.Helper()
	q.Eventually("it is logged", func() bool {
		for _, r = range q.Records() {
			if r.ID == q.id || q.sent.Err() != nil && r.Outcome == "client_closed" {
				return true
			}
		}
		return false
	})
	return r
}
