package refengine

import (
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"evenkeel/bench/lab/refengine/group"
	"evenkeel/bench/lab/refengine/pins"
	"evenkeel/bench/lab/refengine/prompts"
	"evenkeel/bench/lab/reftext"
	"evenkeel/mooncake"
)

// generate serves a chat or completion request.
func (l *life) generate(x *exchange, chat bool) bool {
	e := l.engine
	e.count.Requests.Add(1)
	if id := x.Req.Header.Get("X-Request-Id"); id != "" && e.seen.Repeated(id) {
		e.count.DuplicateIDs.Add(1)
	}
	e.count.admitted(x.Req.Header.Get("X-Evenkeel-Epoch"))
	if e.cfg.Jitter > 0 && !x.Pause(e.jitter()) {
		e.count.Aborted.Add(1)
		return false
	}
	rank, refused := 0, (*apiError)(nil)
	if e.cfg.Connector != SGLang {
		rank, refused = l.rankOf(x)
	}
	if refused != nil {
		return x.fail(refused)
	}
	if e.cfg.Role == Aggregated {
		var landed func()
		rank, landed = l.balance.take(rank, func(i int) (running, waiting int64, kvUsage float64) {
			s := l.rankStats(i)
			return s.Running, s.Waiting, l.kvUsage(s)
		})
		defer landed()
	}
	r, refused := l.parse(chat, x.Port, x.Body)
	if r != nil && r.room != nil && refused == nil {
		x.late = x.words != nil && r.stream
		var lost func() bool
		if rank, refused, lost = l.bound.dispatch(x, *r.room); lost != nil {
			return lost()
		}
	}
	if r != nil {
		l.identify(x, r, rank)
	}
	if refused != nil {
		if r != nil && e.cfg.KV.RejectReleases {
			l.notify(r)
		}
		return x.fail(refused)
	}
	switch r.leg {
	case LegProbe:
		e.count.Probes.Add(1)
	case LegDecode:
		e.count.decoded(x.Req.Header.Get("Authorization"))
	default:
		e.count.Plain.Add(1)
	}
	if done, ok := l.troubleEarly(x, r); done {
		if r.troubles.has(Busy) || r.troubles.has(Throttle) { // it took nothing, and may be asked again
			e.seen.Forget(x.Req.Header.Get("X-Request-Id"))
		}
		return ok
	}
	if done, ok := l.pause.holds(x, r); done {
		return ok
	}
	serve := l.decode
	switch {
	case r.leg != LegProbe:
	case r.room != nil:
		serve = l.bound.prefillRoom
	case e.cfg.Connector == AscendLayerwise:
		serve = l.bound.prefillLayerwise
	default:
		serve = l.probe
	}
	rid := ridOf(r.rank)
	switch {
	case r.room != nil:
		rid = r.room.RID
	case x.Req.URL.Path == mooncake.Tokens.Path():
		rid = r.id
	}
	ok := l.bound.aborts(x, r, rid, serve)
	switch {
	case ok: // also when the client closed at once after the last byte
		e.count.Finished.Add(1)
	case x.Ctx.Err() != nil:
		e.count.Aborted.Add(1)
	}
	return ok
}

// rankOf says which rank a request is for: its port's, or with internal balancing the header's.
// Without it an aggregated engine chooses later. A value that is no number is ignored, as vLLM
// does, and before 0.33 any value at /v1/responses.
func (l *life) rankOf(x *exchange) (int, *apiError) {
	cfg, count := l.engine.cfg, &l.engine.count
	rank, err := strconv.Atoi(x.Req.Header.Get("X-Data-Parallel-Rank"))
	given := err == nil && !(x.Req.URL.Path == "/v1/responses" && cfg.before(33))
	if cfg.Answers.ErrorShape == ShapeRust {
		if rank -= cfg.DPFirst; given && (rank < 0 || rank >= cfg.DPSize) {
			return 0, refuse(400, "engine-core error")
		}
	}
	size := l.engine.ranks()
	if given && (rank < 0 || rank >= size) {
		return 0, refuse(400, "data_parallel_rank %d is out of range [0, %d).", rank, size)
	}
	if cfg.DPMode == "external" {
		if given && rank != x.Port {
			count.RankMismatch.Add(1)
		}
		return x.Port, nil
	}
	if given {
		return rank, nil
	}
	if err != nil {
		count.Unpinned.Add(1)
	}
	if cfg.Role == Aggregated {
		return anyRank, nil
	}
	least := 0
	for i := range size {
		a, b := l.rankStats(i), l.rankStats(least)
		if a.Running+a.Waiting < b.Running+b.Waiting {
			least = i
		}
	}
	return least, nil
}

func (l *life) identify(x *exchange, r *request, rank int) {
	r.rank = rank
	id := x.Req.Header.Get("X-Request-Id")
	if id == "" {
		id = l.engine.suffix() + l.engine.suffix()
	}
	r.id = "cmpl-" + id
	switch {
	case r.chat:
		r.id = "chatcmpl-" + id
	case x.Req.URL.Path == mooncake.Tokens.Path():
		r.id = mooncake.Tokens.RequestID(id)
	}
	switch {
	case r.room != nil:
		if r.id = id; r.room.RID != "" && r.room.RID != id {
			r.id = r.room.RID
			if l.engine.seen.Repeated(r.id) {
				l.engine.count.DuplicateIDs.Add(1)
			}
		}
	case r.leg == LegDecode && !l.engine.cfg.namesRequests():
		r.kv.remote.id = r.id
	case r.leg == LegDecode && l.engine.cfg.Connector == NIXLPush:
		r.kv.remote.name, r.kv.remote.id = r.kv.remote.id, r.baseID()
	}
	r.troubles = l.engine.faults.strike(func(rule Rule) bool {
		return !rule.aside() && rule.Fault != MaskedRank && rule.Phase != PhaseAccept &&
			(rule.Leg == "" || rule.Leg == r.leg) && rule.isAt(rank) &&
			(rule.From == "" || r.kv != nil && rule.From == r.kv.remote.address)
	})
	if tell := l.engine.cfg.Hooks.OnStrike; tell != nil {
		for _, rule := range r.troubles {
			tell(r.prompt.Answer, rule)
		}
	}
}

// troubleEarly is what goes wrong before the engine has the request. done: it was answered.
func (l *life) troubleEarly(x *exchange, r *request) (done, ok bool) {
	cfg, t := l.engine.cfg, r.troubles
	if rule, hit := t.find(Slow, ""); hit && !x.Pause(rule.delay()) {
		return true, false
	}
	if _, hit := t.find(Reset, PhaseBeforeHeaders); hit {
		l.bound.writeHalf(r)
		return true, x.Reset()
	}
	if _, hit := t.find(Hang, PhaseBeforeHeaders); hit {
		l.bound.writeHalf(r)
		return true, x.Hang()
	}
	for _, rule := range t {
		if e := rule.refusal(); e != nil {
			if rule.Cleanup || rule.Fault == Reject && cfg.KV.RejectReleases {
				l.notify(r)
			}
			if e.status == 500 {
				l.bound.writeHalf(r)
			}
			return true, x.failAs(e, rule.shape(cfg))
		}
	}
	if rule, hit := t.find(Error200, ""); hit {
		body, contentType := refuse(500, "Internal server error").body(rule.shape(cfg))
		return true, x.Answer(200, contentType, body)
	}
	if t.has(Garbage) {
		return true, x.Answer(200, r.contentType(), []byte("\x00\x1f\x8b{]not what was asked for\n\n\xff"))
	}
	if n := int64(cfg.MaxQueued); n > 0 && l.rankStats(r.rank).Waiting >= n {
		return true, x.fail(refuse(503, "The engine's queue of %d requests is full.", n))
	}
	if crash := r.crash(cfg); crash != "" { // here a real engine dies
		if cfg.Role == Aggregated {
			return true, l.engine.die(x, r.rank)
		}
		l.engine.count.Crashes.Add(1)
		return true, x.fail(refuse(500, "EngineCore encountered an issue: %s", crash))
	}
	return false, false
}

func (r Rule) shape(cfg Config) ErrorShape {
	if r.Shape != "" {
		return r.Shape
	}
	return cfg.Answers.ErrorShape
}

func (r Rule) delay() time.Duration { return time.Duration(r.DelayMS) * time.Millisecond }

// refusal is the HTTP error of a rule, nil when it is another kind of trouble.
func (r Rule) refusal() *apiError {
	switch r.Fault {
	case Reject:
		return refuse(400, "rejected on demand")
	case Busy:
		e := refuse(503, "The engine's queue is full.")
		e.retryAfter = r.RetryAfter
		return e
	case Throttle:
		e := refuse(429, "Too many requests")
		e.retryAfter = max(1, r.RetryAfter)
		return e
	case Internal:
		return refuse(500, "Internal server error")
	case Status:
		return refuse(int(r.Value), "%s on demand", http.StatusText(int(r.Value)))
	}
	return nil
}

// crash names the assertion that a request would break in a real engine.
func (r *request) crash(cfg Config) string {
	if r.rows && r.leg == LegDecode && r.kv.remote.missing == "" && cfg.before(31) { // vLLM issue 50792
		return "OverflowError: out of range integral type conversion attempted"
	}
	if r.minTokens > 0 {
		for _, id := range r.stopIDs {
			if id < 0 || id >= reftext.VocabSize {
				return "device-side assert: stop token id " + strconv.Itoa(int(id)) + " indexes the min_tokens mask"
			}
		}
	}
	if r.leg == LegProbe && r.kv.remote.missing != "" {
		return "KeyError: '" + r.kv.remote.missing + "'"
	}
	if r.leg == LegDecode && r.kv.remote.missing == "" && r.kv.remote.named && len(r.kv.remote.blocks) == 0 {
		return "assert num_external_tokens == 0: do_remote_prefill without blocks"
	}
	return ""
}

func (r *request) contentType() string {
	switch {
	case r.troubles.has(WrongType):
		return "text/plain; charset=utf-8"
	case r.stream:
		return typeEvents
	}
	return typeJSON
}

// probe runs a prefill and answers with its hand-off.
func (l *life) probe(x *exchange, r *request) bool {
	p := r.plan(r.prompt.Answer)
	if r.troubles.has(EOSFirst) && r.minTokens == 0 && !r.ignoreEOS {
		p.want, p.finish, p.core = 1, "stop", "stop"
	}
	type outcome struct {
		cached  int
		handoff []byte
	}
	a := l.newAnswer(x, r, p) // before the prefill, so that an abort of it is answered, too
	done := make(chan outcome, 1)
	var gone atomic.Bool
	lost := func() { // whoever takes the outcome counts it
		select {
		case o := <-done:
			if string(o.handoff) != "null" {
				l.engine.count.LostHandoffs.Add(1)
			}
		default:
		}
	}
	l.prefills[r.rank].Add(&prompts.Job{Ctx: x.Ctx, IDs: r.prompt.IDs, Salt: r.salt,
		More: time.Duration(p.want-1) * l.engine.cfg.Steps.C0,
		Done: func(cached int, free func()) { // from here on only a pull or the timeout frees
			done <- outcome{cached, l.keep(r, p, cached, free)}
			if gone.Load() {
				lost()
			}
		}})
	select {
	case <-x.Ctx.Done():
		gone.Store(true)
		lost()
		return false
	case o := <-done:
		l.engine.count.Tokens.Add(int64(p.want))
		l.group.Gauges(r.rank).Prefilled(r.prompt.Tokens(), p.want)
		a.cached = o.cached
		return a.whole(p.want, p.finish, p.stopReason, o.handoff)
	}
}

// keep pins a finished prefill and returns its hand-off, or frees it where an engine hands nothing
// off.
func (l *life) keep(r *request, p plan, cached int, free func()) []byte {
	if p.core != "length" && !l.engine.cfg.keepsEnded() || r.troubles.has(NullHandoff) {
		free()
		l.engine.count.NullHandoffs.Add(1)
		return []byte("null")
	}
	k := &pins.Pin{ID: r.kv.transferID, Engine: l.engineID(r.rank), Key: r.prompt.Key, Tokens: r.prompt.Tokens(), Free: free,
		Blocks: l.newBlocks(r.prompt.Tokens())}
	if l.engine.cfg.Connector == NIXLPush {
		k.ID = r.baseID()
		k.Name = k.ID + "-" + l.engine.suffix()
		l.bound.keepUntilAsked(r, k, cached)
		return l.handoffOf(r.rank, r, k, cached, reftext.TokenID(p.answer, p.from))
	}
	if k.ID == "" {
		if k.ID = r.id; l.engine.cfg.namesRequests() {
			k.ID += "-" + l.engine.suffix()
		}
	}
	l.pins.Add(k)
	return l.handoffOf(r.rank, r, k, cached, reftext.TokenID(p.answer, p.from))
}

// decode admits a request to the group, gets its KV and relays its tokens.
func (l *life) decode(x *exchange, r *request) bool {
	right := r.prompt.Answer
	cache := l.prefills[r.rank].Cache
	if _, bad := cache.Match(r.salt, r.prompt.IDs); bad { // it decodes on what is there, and pulls the rest
		l.engine.count.BadHits.Add(1)
		right ^= badKV
	}
	p := r.plan(right)
	remote := r.leg == LegDecode && r.kv.remote.missing == ""
	if r.leg == LegDecode && !remote { // a real engine logs a warning and recomputes
		l.engine.count.Unknown.Add(1)
	}
	a := l.newAnswer(x, r, p)
	if r.stream && !a.lazy && !a.open() { // 200 before the pull starts
		return false
	}
	j := group.NewJob(r.rank, r.prompt.IDs, r.salt, remote, p.want)
	a.job = j
	j.Beyond = x.Req.Header.Get("X-Evenkeel-Beyond-Slots") != ""
	if j.Keeps = l.engine.cfg.keepsAnswer(r, p); j.Keeps {
		name := r.id + "-" + l.engine.suffix()
		a.handBack = handBack(l, r, name)
		defer giveUpLater(l, j)
	}
	if remote {
		defer l.renew(x, r, j)()
	}
	tokens, from := int64(r.prompt.Tokens()), l.prefills[r.rank]
	if !remote && l.engine.cfg.Role != Aggregated {
		from.Asked.Add(tokens)
	}
	l.group.Submit(j)
	a.letGo = sync.OnceFunc(func() {
		if j.End.Load() == group.GoingOn {
			l.group.Cancel(j)
		}
	})
	defer func() { a.letGo() }() // it may be replaced
	if remote {
		fetch := l.fetchKV
		if l.engine.cfg.Connector.written() {
			fetch = l.bound.awaitKV
		}
		answer, local, err := fetch(x, r, j, a, right)
		if l.ctx.Err() != nil {
			return false
		}
		if x.Ctx.Err() != nil {
			l.engine.count.InTransfer.Add(1) // the pin stays until its timeout, as in vLLM
			return false
		}
		if err != nil {
			return a.failed(err, l.engine.cfg.Answers.ErrorShape)
		}
		a.plan = r.plan(answer)
		from.Asked.Add(tokens)
		if !local { // its blocks are in the prefix cache like any others
			from.Pulled.Add(tokens)
			cache.Add(r.salt, r.prompt.IDs, answer != r.prompt.Answer)
		}
		l.group.Landed(j, a.plan.want, local)
	}
	if r.stream {
		return a.relay(j)
	}
	return a.collect(j)
}
