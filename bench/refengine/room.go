package refengine

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"

	"evenkeel/bench/refengine/bind"
)

// sglangEndpoints are the paths of SGLang that vLLM lacks or serves in another way; without a method it has no such path.
var sglangEndpoints = map[string]endpoint{
	"/health_generate":    {"GET", true, (*life).serveHealth},
	"/get_model_info":     {"GET", true, (*life).serveModelInfo},
	"/abort_request":      {"POST", false, func(l *life, x *exchange) bool { return l.bound.serveAbort(x) }},
	"/version":            {},
	"/ping":               {},
	"/query":              {},
	"/reset_prefix_cache": {},
	"/flush_cache":        {"POST", true, (*life).serveReset},
}

func (l *life) serveModelInfo(x *exchange) bool {
	return x.answerJSON(map[string]any{"model_path": l.engine.cfg.Model, "tokenizer_path": l.engine.cfg.Model, "is_generation": true})
}

// serveAbort ends all requests whose rid begins with the one that is given.
func (b *bound) serveAbort(x *exchange) bool {
	var q struct {
		RID string `json:"rid"`
		All bool   `json:"abort_all"`
	}
	if err := json.Unmarshal(x.Body, &q); err != nil {
		return x.fail(refuse(400, "body: %v", err))
	}
	if q.All {
		q.RID = ""
	}
	b.rids.Abort(q.RID)
	return serveOK(b.life, x)
}

// sglangMetrics renders the ranks first to last. usage other than NaN stands where the KV usage would.
func (l *life) sglangMetrics(first, last int, usage float64) []byte {
	cfg, count := l.engine.cfg, &l.engine.count
	var ranks []bind.Gauges
	for rank := first; rank <= last; rank++ {
		of, g, p := l.rankStats(rank), l.group.Gauges(rank), l.prefills[rank]
		used := of.KVUsed
		if !math.IsNaN(usage) {
			used = int64(usage * float64(cfg.KVTokens))
		}
		ranks = append(ranks, bind.Gauges{Rank: rank, Running: of.Running, Waiting: p.Waiting.Load(), Bootstrap: p.Bootstrap.Load(), Inflight: p.Inflight.Load(),
			Prealloc: g.Waiting.Load() - g.Deferred.Load(), Transfer: g.Deferred.Load(), Capacity: int64(cfg.KVTokens), Used: used,
			Queries: p.Queries.Load(), Hits: p.Hits.Load(), Retracted: count.Preemptions.Load(), FailedBoot: count.RoomTimeouts.Load(), FailedKV: count.FailedPulls.Load()})
	}
	return bind.AppendMetrics(nil, cfg.Model, string(cfg.Role), ranks)
}

// enter reads the room of a request. Which leg it is, the engine's role says.
func (r *request) enter(m map[string]json.RawMessage, role Role) *apiError {
	room, err := bind.ReadRoom(m)
	if err != nil {
		return refuse(400, "%v", err).of("bootstrap_room")
	}
	r.room, r.leg, r.kv = room, LegProbe, &kvParams{remote: remote{address: room.Address}}
	if role == Decode {
		r.leg = LegDecode
	}
	return nil
}

// rankOfRoom says which rank a leg is for: its port's, or behind one port that of the header, or else
// that of the body, or else that of the room.
func (b *bound) rankOfRoom(x *exchange, r *request) (int, *apiError) {
	cfg := b.engine.cfg
	rank := int(r.room.ID % int64(cfg.DPSize))
	if r.room.Rank >= 0 {
		rank = r.room.Rank
	}
	if header, err := strconv.Atoi(x.Req.Header.Get("X-Data-Parallel-Rank")); err == nil {
		rank = header
	}
	switch {
	case cfg.DPMode == "external":
		return x.Port, nil
	case rank < 0 || rank >= cfg.DPSize:
		return 0, refuse(400, "routed_dp_rank %d is out of range [0, %d).", rank, cfg.DPSize)
	}
	return rank, nil
}

// finds says whether a registration reaches a request: it is meant for an engine that runs, and for the rank that has the room.
func (b *bound) finds(q bind.Registration) bool {
	size := b.engine.cfg.DPSize
	if q.Engine == "" {
		room, err := strconv.ParseInt(q.ID, 10, 64)
		return err == nil && (q.Rank < 0 || int(room%int64(size)) == q.Rank)
	}
	for rank := range size {
		if q.Engine == b.engineID(rank) {
			return true
		}
	}
	return false
}

// aborts serves a leg until the end, or until somebody aborts it.
func (b *bound) aborts(x *exchange, r *request, serve func(*exchange, *request) bool) (ok bool) {
	within, leave := b.rids.Enter(x.Ctx, r.id)
	whole := x.Ctx
	x.Ctx = within
	ok = serve(x, r)
	x.Ctx = whole
	if leave() && !ok && whole.Err() == nil && r.reply != nil {
		return r.reply.aborted()
	}
	return ok
}

// aborted ends an answer that somebody has aborted.
func (a *answer) aborted() bool {
	a.letGo()
	if a.ends = nil; !a.r.stream {
		return a.whole(0, "abort", "null", nil)
	}
	return a.send(func(dst []byte) []byte { return a.appendFinish(dst, "abort", "null", "") }) && a.close()
}

// prefillRoom prefills once the decode engine has said where the KV goes, writes it there, and answers with the
// first token. When it fails before that, nobody tells the decode engine.
func (b *bound) prefillRoom(x *exchange, r *request) bool {
	cfg := b.engine.cfg
	a := b.newAnswer(x, r, r.firstOf(r.plan(r.prompt.Answer)))
	if rank := int(r.room.ID % int64(cfg.DPSize)); rank != r.rank {
		return a.failed(refuse(500, "bootstrap room %d belongs to dp rank %d, not %d", r.room.ID, rank, r.rank), cfg.ErrorShape)
	}
	late, _ := r.troubles.find(BootstrapSlow, "")
	rank := b.prefills[r.rank]
	rank.Bootstrap.Add(1)
	to, err := b.desk.Meet(x.Ctx, r.baseID(), cfg.BootstrapTimeout, late.delay())
	rank.Bootstrap.Add(-1)
	switch {
	case errors.Is(err, bind.ErrLate):
		b.engine.count.RoomTimeouts.Add(1)
		return a.failed(refuse(500, "Request timed out after %v in KVPoll.Bootstrapping", cfg.BootstrapTimeout), cfg.ErrorShape)
	case err != nil:
		return false
	}
	cached, free, ok := b.compute(x, r)
	if !ok {
		return false
	}
	defer free()
	a.cached = cached
	rank.Inflight.Add(1)
	ok = b.transfer(x, r)
	rank.Inflight.Add(-1)
	if !ok {
		return false
	}
	p := b.push(r, cached)
	late, p.Broken = r.troubles.find(PrefillAbort200, "")
	if p.Broken {
		a.prompt = r.prompt.Tokens() / 2
	}
	b.desk.Spend(p)
	b.tell(r, to.Address, p)
	if p.Broken && !x.Pause(late.delay()) {
		return false
	}
	switch {
	case a.breaks:
		return a.breakOff()
	case !r.stream:
		return a.whole(1, a.finish, a.stopReason, nil)
	}
	return (!r.chat || a.send(a.appendRole)) && a.sendTokens(1, a.finish) && a.close()
}

// joinRoom tells the prefill engine where the KV goes, and gives the request up when that takes too long or
// the prefill engine is gone.
func (b *bound) joinRoom(x *exchange, r *request, landing *bind.Landing) {
	cfg, to, ctx := b.engine.cfg, r.room.Address, x.Ctx
	err := bind.Post(b.ctx, b.pull, to, bind.RegisterPath, bind.Registration{ID: r.baseID(), Address: b.address(r.rank), Rank: r.room.PrefillRank})
	if err != nil {
		b.landings.Fail(landing, fmt.Errorf("bootstrap: %w", err))
		return
	}
	b.wg.Go(func() { b.landings.Watch(ctx, b.pull, landing, to, cfg.WaitingTimeout, cfg.Heartbeat) })
}

// sglang says whose dialect an answer is in.
func (a *answer) sglang() bool { return a.r.room != nil }

// appendSGLangReason tells why the answer ends: in every chunk, and by the token or text that matched.
func appendSGLangReason(dst []byte, finish, matched string) []byte {
	if finish == "" {
		return append(dst, `,"finish_reason":null,"matched_stop":null`...)
	}
	if finish == "stop" && matched == "null" {
		matched = "2" // the end of the sequence
	}
	return fmt.Appendf(dst, `,"finish_reason":%q,"matched_stop":%s`, finish, matched)
}

// appendSGLangUsage closes a usage object that has the counts.
func (a *answer) appendSGLangUsage(dst []byte, made int, final bool) []byte {
	switch {
	case final && a.details:
		dst = fmt.Appendf(dst, `,"prompt_tokens_details":{"cached_tokens":%d}`, a.cached)
	case !final:
		dst = append(dst, `,"prompt_tokens_details":null`...)
	}
	return fmt.Appendf(dst, `,"reasoning_tokens":%d}`, min(made, a.reasoningEnd()))
}
