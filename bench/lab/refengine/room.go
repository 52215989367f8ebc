package refengine

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"

	"evenkeel/bench/lab/refengine/bind"
	"evenkeel/bench/lab/refengine/group"
	"evenkeel/bench/lab/refengine/messages"
	"evenkeel/bench/lab/refengine/responses"
	"evenkeel/bench/lab/refengine/tokens"
	"evenkeel/mooncake"
)

// sglangEndpoints are the paths of SGLang that vLLM lacks or serves in another way; without a
// method it has no such path.
var sglangEndpoints = map[string]endpoint{
	"/ready":                    {"GET", true, func(l *life, x *exchange) bool { return l.pause.serveReady(x) }},
	"/pause_generation":         {"POST", false, func(l *life, x *exchange) bool { return l.pause.servePauseGeneration(x) }},
	"/continue_generation":      {"POST", false, func(l *life, x *exchange) bool { return l.pause.serveContinueGeneration(x) }},
	"/flush_cache":              {"POST", false, func(l *life, x *exchange) bool { return l.pause.serveFlush(x) }}, // GET, too
	"/health":                   {"GET", true, (*life).serveHealthToken},
	"/server_info":              {"GET", false, (*life).serveServerInfo},
	"/v1/responses":             {"POST", false, (*life).serveResponseOfSGLang},
	"/v1/messages":              {"POST", false, (*life).serveMessageOfSGLang},
	"/v1/messages/count_tokens": {"POST", false, (*life).serveCount},
	"/abort_request":            {"POST", false, func(l *life, x *exchange) bool { return l.bound.serveAbort(x) }},
	mooncake.Generate.Path(): {"POST", false, func(l *life, x *exchange) bool {
		w := new(tokens.SGLang)
		return l.translate(x, false, w.Completion, w)
	}},
	mooncake.Tokens.Path(): {},
	tokens.AbortPath:       {},
	"/v1/score":            {"POST", false, func(l *life, x *exchange) bool { return l.bound.serveScore(x) }},
	"/v1/rerank":           {"POST", false, func(l *life, x *exchange) bool { return l.bound.serveScore(x) }},
	"/v1/embeddings":       {"POST", false, (*life).serveNoEmbedding},
	"/classify":            {"POST", false, (*life).serveNoEmbedding},
	"/version":             {},
	"/query":               {},
	"/reset_prefix_cache":  {},
	"/pause":               {},
	"/resume":              {},
	"/is_paused":           {},
	"/update_weights":      {},
}

// serveHealthToken generates a token, and looks once a second whether anything came.
func (l *life) serveHealthToken(x *exchange) bool {
	if mode, _ := l.pause.now(); mode != "" { // no token comes
		return x.Pause(healthOfSGLang) && x.Answer(503, "", nil)
	}
	return x.Pause(time.Second) && l.serveHealth(x)
}

func (l *life) serveServerInfo(x *exchange) bool {
	cfg := l.engine.cfg
	return x.answerJSON(map[string]any{
		"version": cfg.Version, "disaggregation_mode": cfg.Role, "dp_size": cfg.DPSize, "max_running_requests": cfg.Slots * cfg.DPSize,
		"disaggregation_bootstrap_port": l.ports[0], "load_balance_method": cfg.SGLang.LoadBalance,
		"elastic_ep_backend": cfg.SGLang.ElasticEP,
	})
}

// roomsEverywhere says whether a version of SGLang reads rooms at every endpoint.
func (c Config) roomsEverywhere() bool {
	var minor, patch int
	n, _ := fmt.Sscanf(c.Version, "0.%d.%d", &minor, &patch)
	return n == 2 && (minor > 5 || minor == 5 && patch >= 23)
}

func (l *life) serveResponseOfSGLang(x *exchange) bool {
	w := &responses.Writer{Model: l.engine.cfg.Model.Name, TellsIncomplete: true, SGLang: true}
	return l.translate(x, true, func(body []byte) ([]byte, error) { return w.ChatOfSGLang(body, l.engine.cfg.roomsEverywhere()) }, w)
}

func (l *life) serveMessageOfSGLang(x *exchange) bool {
	w := new(messages.SGLang)
	chat := func(body []byte) (text []byte, err error) {
		var asked struct{ Model string }
		_ = json.Unmarshal(body, &asked) // what is no object, ChatOfSGLang refuses
		w.Model = asked.Model
		text, err = messages.ChatOfSGLang(body, l.engine.cfg.roomsEverywhere())
		w.Taken = err == nil
		return text, err
	}
	return l.translate(x, true, chat, w)
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

// sglangMetrics renders the ranks first to last. usage other than NaN stands where the KV usage
// would.
func (l *life) sglangMetrics(first, last int, usage float64) []byte {
	cfg := l.engine.cfg
	var ranks []bind.Gauges
	var prompts, answers []*group.Lengths // SGLang's histograms are of all ranks of a server
	for rank := first; rank <= last; rank++ {
		of, g, p := l.rankStats(rank), l.group.Gauges(rank), l.prefills[rank]
		used := of.KVUsed
		if !math.IsNaN(usage) {
			used = int64(usage * float64(cfg.KV.Tokens))
		}
		on := bind.Gauges{Rank: rank, Running: of.Running, Waiting: p.Waiting.Load(), Bootstrap: p.Bootstrap.Load(), Inflight: p.Inflight.Load(),
			Prealloc: g.Waiting.Load() - g.Deferred.Load(), Transfer: g.Deferred.Load(), Capacity: int64(cfg.KV.Tokens), Used: used,
			Decoded: g.Generated.Load() - g.Begun.Load(), Cached: g.Hits.Load() + p.Hits.Load(),
			Computed: max(0, g.Prompt.Load()-g.Pulled.Load()-g.Hits.Load()-p.Hits.Load())}
		if cfg.SGLang.BarrierMetrics {
			on.Steps, on.WaitNanos, on.Pairs, on.FewerPairs = g.Steps.Load(), g.WaitNanos.Load(), g.Pairs.Load(), g.FewerPairs.Load()
		}
		ranks = append(ranks, on)
		prompts, answers = append(prompts, &g.Prompts), append(answers, &g.Answers)
	}
	role := string(cfg.Role)
	if cfg.Role == Aggregated {
		role = "unified"
	}
	out := bind.AppendMetrics(nil, cfg.Model.Name, role, ranks)
	lengths := func(name string, of []*group.Lengths) {
		out = fmt.Appendf(out, "# HELP %s lengths of the reference engine.\n# TYPE %[1]s histogram\n", name)
		out = appendLengths(out, name, fmt.Sprintf("model_name=%q", cfg.Model.Name), of...)
	}
	lengths("sglang:prompt_tokens_histogram", prompts)
	lengths("sglang:generation_tokens_histogram", answers)
	return out
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

// dispatch says which rank a leg is for: its port's, or behind one port the one that the controller
// chooses, if the server has one. A header names a rank before the body does. lost is set if no
// answer comes.
func (b *bound) dispatch(x *exchange, room bind.Room) (rank int, refused *apiError, lost func() bool) {
	cfg := b.engine.cfg
	named := room.Rank
	var wrong error
	if header := x.Req.Header.Get("X-Data-Parallel-Rank"); header != "" {
		named, wrong = strconv.Atoi(header)
	}
	masked := func(rank int) bool {
		return b.engine.faults.strike(func(r Rule) bool { return r.Fault == MaskedRank && r.isAt(rank) }) != nil
	}
	var err error
	size := cfg.DPSize
	if cfg.DPMode == "external" { // a server of its own
		rank, size = x.Port, 1
	}
	switch {
	case wrong != nil:
		refused = refuse(400, "Invalid X-Data-Parallel-Rank header: must be an integer, got '%s'", x.Req.Header.Get("X-Data-Parallel-Rank"))
	case named != bind.NoRank && (named < 0 || named >= size):
		refused = refuse(400, "routed_dp_rank=%d out of range [0, %d)", named, size)
	case size > 1:
		if rank, err = b.controller.Dispatch(named, room.ID, masked); err == nil && named < 0 && masked(rank) {
			lost = x.Hang // no process reads the request from that rank's socket
		}
	}
	switch {
	case err != nil:
		lost = func() bool { return b.engine.die(x, rank) }
	case refused == nil && room.ID < 0:
		refused = refuse(400, "Invalid request: Disaggregated request received without bootstrap room id.")
	}
	return rank, refused, lost
}

// serveScore makes a request of one token of what is to be scored, and gives it no room.
func (b *bound) serveScore(x *exchange) bool {
	_, refused, lost := b.dispatch(x, bind.Room{ID: -1, Rank: bind.NoRank})
	if lost != nil {
		return lost()
	}
	return x.fail(refused)
}

// serveNoEmbedding refuses a request that only an embedding model can answer.
func (l *life) serveNoEmbedding(x *exchange) bool {
	return x.fail(refuse(400, "This model does not appear to be an embedding model by default. Please add `--is-embedding` when launching "+
		"the server or try another model."))
}

// attnRank is the rank that a rank takes itself for: replicas without DP attention all believe that
// they are the first.
func (b *bound) attnRank(rank int) int {
	if b.engine.cfg.SGLang.Replicas {
		return 0
	}
	return rank
}

// finds says whether a registration reaches a request: it is meant for an engine that runs, and for
// the rank that has the room.
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
func (b *bound) aborts(x *exchange, r *request, rid string, serve func(*exchange, *request) bool) (ok bool) {
	within, leave := b.rids.Enter(x.Ctx, rid)
	whole := x.Ctx
	x.Ctx = within
	ok = serve(x, r)
	x.Ctx = whole
	if leave() && !ok && whole.Err() == nil && r.reply != nil {
		return r.reply.aborted()
	}
	return ok
}

// aborted ends an answer that somebody has aborted. Its last token is not in it: vLLM tells the end
// with that token, and drops what its core says of a request that the front end has aborted.
func (a *answer) aborted() bool {
	a.letGo()
	made := 0
	if a.job != nil {
		made = min(int(a.job.Made.Load()), a.want-1)
	}
	switch a.ends = nil; {
	case !a.r.stream && a.job != nil: // all that there is is in it
		return a.whole(made, "abort", "null", nil)
	case a.job != nil && !a.sglang():
		if made > a.sent && !a.sendTokens(made, "") {
			return false
		}
	case !a.r.stream:
		return a.whole(0, "abort", "null", nil)
	}
	return a.send(func(dst []byte) []byte { return a.appendFinish(dst, "abort", "null", "") }) && a.close()
}

// prefillRoom prefills once the decode engine has said where the KV goes, writes it there, and
// answers with the first token. When it fails before that, nobody tells the decode engine.
func (b *bound) prefillRoom(x *exchange, r *request) bool {
	cfg := b.engine.cfg
	a := b.newAnswer(x, r, r.firstOf(r.plan(r.prompt.Answer)))
	switch rank := int(r.room.ID % int64(cfg.DPSize)); {
	case cfg.DPSize == 1 || r.room.PrefillRank >= 0:
	case !b.controller.Follows: // it tells its bootstrap server, and all of the rank waits meanwhile
		b.engine.count.RankPosts.Add(1)
	case rank != b.attnRank(r.rank):
		return a.failed(refuse(500, "Prefill bootstrap failed for request with exception KVTransferError(bootstrap_room=%d): "+
			"follow_bootstrap_room conflict: dispatched to dp_rank %d but bootstrap_room %d implies dp_rank %d.",
			r.room.ID, b.attnRank(r.rank), r.room.ID, rank), cfg.Answers.ErrorShape)
	}
	late, _ := r.troubles.find(BootstrapSlow, "")
	rank := b.prefills[r.rank]
	var to bind.Registration
	var err error
	if !r.room.Fake {
		rank.Bootstrap.Add(1)
		to, err = b.desk.Meet(x.Ctx, r.baseID(), cfg.SGLang.BootstrapTimeout, late.delay())
		rank.Bootstrap.Add(-1)
	}
	switch {
	case errors.Is(err, bind.ErrLate):
		b.engine.count.RoomTimeouts.Add(1)
		return a.failed(refuse(500, "Prefill bootstrap failed for request with exception KVTransferError(bootstrap_room=%d): Request %d timed "+
			"out after %v in KVPoll.Bootstrapping", r.room.ID, r.room.ID, cfg.SGLang.BootstrapTimeout), cfg.Answers.ErrorShape)
	case err != nil:
		return false
	}
	cached, free, ok := b.compute(x, r)
	if !ok {
		return false
	}
	defer free()
	a.cached = cached
	if !r.room.Fake && !b.writeRoom(x, r, a, to) {
		return false
	}
	switch {
	case r.cut(to): // handle_inflight_transfer_failure, SGLang 0.5.23, disaggregation/prefill.py
		return a.failed(refuse(500, "Prefill transfer failed for request rank=%d req.bootstrap_room=%d with exception "+
			"KVTransferError(bootstrap_room=%d): Failed to send kv chunk", r.rank, r.room.ID, r.room.ID), cfg.Answers.ErrorShape)
	case a.breaks:
		return a.breakOff()
	case !r.stream:
		return a.whole(1, a.finish, a.stopReason, nil)
	}
	return (!r.chat || a.send(a.appendRole)) && a.sendTokens(1, a.finish) && a.close()
}

// cut says whether no KV can be written to the decode engine.
func (r *request) cut(to bind.Registration) bool { return to.Cut || r.troubles.has(TransferFails) }

// writeRoom writes the KV of a prompt to its decode engine; false: the request was ended. A
// transfer that has begun goes on to its end all the same.
func (b *bound) writeRoom(x *exchange, r *request, a *answer, to bind.Registration) bool {
	rank := b.prefills[r.rank]
	rank.Inflight.Add(1)
	select {
	case <-time.After(b.transferTime(r)):
	case <-b.ctx.Done():
	}
	rank.Inflight.Add(-1)
	if b.ctx.Err() != nil {
		return false
	}
	p := b.push(r, a.cached)
	p.Failed = p.Failed || r.cut(to)
	late, broken := r.troubles.find(PrefillAbort200, "")
	if p.Broken = broken; broken {
		a.prompt = r.prompt.Tokens() / 2
	}
	b.desk.Spend(p)
	b.tell(r, to.Address, p)
	return x.Ctx.Err() == nil && (!broken || x.Pause(late.delay()))
}

// joinRoom tells the prefill engine where the KV goes, and gives the request up when that takes too
// long or the prefill engine is gone.
func (b *bound) joinRoom(x *exchange, r *request, landing *bind.Landing) {
	cfg, to, ctx := b.engine.cfg, r.room.Address, x.Ctx
	err := bind.Post(b.ctx, b.pull, to, bind.RegisterPath,
		bind.Registration{ID: r.baseID(), Address: b.address(r.rank), Rank: r.room.PrefillRank, Cut: r.troubles.has(TransferFails)})
	if err != nil {
		b.landings.Fail(landing, fmt.Errorf("bootstrap: %w", err))
		return
	}
	b.wg.Go(func() { b.landings.Watch(ctx, b.pull, landing, to, cfg.SGLang.WaitingTimeout, cfg.SGLang.Heartbeat) })
}

// sglang says whose dialect an answer is in.
func (a *answer) sglang() bool { return a.r.room != nil }

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
