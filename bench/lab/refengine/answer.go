package refengine

import (
	"sync/atomic"
	"time"

	"evenkeel/bench/lab/refengine/group"
)

// answer writes what a request gets, streamed or whole.
type answer struct {
	plan
	writer
	life *life
	x    *exchange
	r    *request

	sent     int  // tokens whose chunk was written
	openTool bool // the tool call's first chunk was written
	usageAll bool // usage on every chunk
	breaks   bool
	rule     Rule // how it breaks

	lazy   bool         // the headers of its stream wait for the first event
	prompt int          // tokens of the prompt that usage tells of
	spoilt *atomic.Bool // its KV was overwritten; nil: it cannot be

	handBack func(made int) []byte // where the KV is that stays; nil: none does

	job   *group.Job // nil: it is not in the group
	letGo func()     // has the group forget the request, before the client is told that it is over
}

func (l *life) newAnswer(x *exchange, r *request, p plan) *answer {
	a := &answer{plan: p, life: l, x: x, r: r, writer: newWriter(l.engine.cfg, r), letGo: func() {}, prompt: r.prompt.Tokens()}
	a.lazy = r.stream && r.room != nil
	r.reply = a
	a.rule, a.breaks = r.troubles.breakAt()
	a.usageAll = r.continuousUsage || l.engine.cfg.Answers.ForceUsage || r.troubles.has(UsageAlways)
	x.CRLF, x.Split = r.troubles.has(CRLF), r.troubles.has(SplitBytes)
	return a
}

// open sends the headers of a stream.
func (a *answer) open() bool {
	if a.lazy = false; !a.x.Stream(a.r.contentType()) {
		return false
	}
	if _, hit := a.r.troubles.find(Reset, PhaseAfterHeaders); hit {
		return a.x.Reset()
	}
	if _, hit := a.r.troubles.find(Hang, PhaseAfterHeaders); hit {
		return a.x.Hang()
	}
	return true
}

// waitFor waits for ch or for the client to leave (false).
func waitFor[T any](a *answer, ch <-chan T) bool {
	select {
	case <-ch:
		return true
	case <-a.x.Ctx.Done():
		return false
	}
}

func (a *answer) sendComment() bool {
	return a.x.Event(func(dst []byte) []byte { return append(dst, ": keep-alive\n\n"...) })
}

// send writes one event. build appends it.
func (a *answer) send(build func(dst []byte) []byte) bool {
	if a.lazy && !a.open() {
		return false
	}
	if rule, hit := a.r.troubles.find(Slow, ""); hit && (rule.Tokens == 0 || a.sent < rule.Tokens) && !a.x.Pause(rule.delay()) {
		return false
	}
	if a.r.troubles.has(Comments) && !a.sendComment() {
		return false
	}
	return a.x.Event(build)
}

// relay streams the tokens of a job as the group makes them.
func (a *answer) relay(j *group.Job) bool {
	opened := false
	for {
		end := j.End.Load() // before made: an end is stored after the last token
		made := int(j.Made.Load())
		if made > 0 && !opened {
			opened = true
			a.countCached(j)
			if a.breaks && a.rule.AfterTokens == 0 && !a.rule.Role {
				return a.breakOff()
			}
			if a.r.chat && !a.send(a.appendRole) {
				return false
			}
		}
		if made > 0 || end != group.GoingOn {
			if more, ok := a.catchUp(made, end != group.GoingOn); !more {
				return ok
			}
		}
		switch end {
		case group.Finished:
			return a.close()
		case group.Recomputed:
			return a.giveBack("")
		}
		if !waitFor(a, j.Wake) {
			return false
		}
	}
}

// catchUp sends the chunks that made tokens fill. more is false when the
// stream is over, ok then says whether the connection is still good.
func (a *answer) catchUp(made int, ended bool) (more, ok bool) {
	for {
		if a.breaks && a.sent >= a.rule.AfterTokens {
			return false, a.breakOff()
		}
		to := a.chunkEnd(made, ended)
		if to <= a.sent {
			return true, true
		}
		finish := ""
		if to == a.want && !a.r.troubles.has(MissingFinish) && (!a.breaks || to < a.rule.AfterTokens || a.heldBack() == "") { // else text follows
			finish = a.finish
		}
		if !a.sendTokens(to, finish) {
			return false, false
		}
	}
}

// chunkEnd is the token at which the next chunk ends, or sent when it is not
// filled yet.
func (a *answer) chunkEnd(made int, ended bool) int {
	cfg := a.life.engine.cfg
	full := a.sent + cfg.Steps.TokensPerChunk
	if a.sent > 0 {
		full = a.sent + cfg.Steps.TokensPerChunk*cfg.Steps.StreamInterval
	}
	if rule, hit := a.r.troubles.find(Swallow, ""); hit && a.sent == rule.AfterTokens {
		kept := rule.Tokens
		if kept == 0 {
			kept = 4
		}
		full = a.sent + kept + 1
	} else if hit && a.sent < rule.AfterTokens {
		full = min(full, rule.AfterTokens)
	}
	full = min(full, a.want)
	if n := a.reasoningEnd(); a.sent < n {
		full = min(full, n)
	}
	if a.breaks && a.sent < a.rule.AfterTokens {
		full = min(full, a.rule.AfterTokens)
	}
	if full <= made {
		return full
	}
	if ended {
		return made
	}
	return a.sent
}

func (a *answer) reasoningEnd() int {
	if !a.r.chat || a.from > 0 {
		return 0
	}
	return min(a.life.engine.cfg.Answers.ReasoningTokens, a.want)
}

// sendTokens sends the chunk up to token to.
func (a *answer) sendTokens(to int, finish string) bool {
	if a.r.tool != "" && a.sent >= a.reasoningEnd() {
		return a.sendToolTokens(to, finish)
	}
	if a.sglang() && a.r.chat && finish != "" { // its reason comes after the last token
		return a.sendTokens(to, "") && a.send(func(dst []byte) []byte { return a.appendFinish(dst, finish, a.stopReason, "") })
	}
	reasoning := a.sent < a.reasoningEnd()
	hidden := reasoning && a.r.hideReasoning && finish == "" // neither text nor ids nor logprobs: the tokens are counted only
	if !hidden && !a.send(func(dst []byte) []byte { return a.appendTokens(dst, to, reasoning, finish) }) {
		return false
	}
	a.sent = to
	return true
}

// sendToolTokens sends the head of the tool call, a piece of its arguments
// and, at the end, the finish as a chunk of its own.
func (a *answer) sendToolTokens(to int, finish string) bool {
	if !a.openTool {
		a.openTool = true
		if !a.send(a.appendToolHead) {
			return false
		}
	}
	if !a.send(func(dst []byte) []byte { return a.appendToolTokens(dst, to, to == a.want && a.finish == "tool_calls") }) {
		return false
	}
	a.sent = to
	if finish == "" {
		return true
	}
	if a.cutCall(finish) && a.life.engine.cfg.before(31) {
		finish = "tool_calls"
	}
	return a.send(func(dst []byte) []byte { return a.appendFinish(dst, finish, a.stopReason, "") })
}

// cutCall says whether max_tokens cuts a call that the request does not name. In a stream vLLM
// tells the piece that there is, and before 0.31 calls it whole. In an answer in one piece it finds
// no call, and says the piece as text (0.27.1 to 0.33,
// entrypoints/openai/chat_completion/serving.py).
func (a *answer) cutCall(finish string) bool {
	return a.r.tool != "" && !a.r.named && finish == "length" && !a.sglang()
}

// close ends a whole stream.
func (a *answer) close() bool {
	if a.r.includeUsage || a.life.engine.cfg.Answers.ForceUsage || a.r.troubles.has(UsageAlways) {
		if !a.send(a.appendUsage) {
			return false
		}
	}
	return a.done()
}

func (a *answer) done() bool {
	if a.r.troubles.has(MissingDone) {
		return a.x.EndStream()
	}
	return a.send(func(dst []byte) []byte { return append(dst, "data: [DONE]\n\n"...) }) && a.x.EndStream()
}

// giveBack ends a preempted request as the recompute scheduler does.
func (a *answer) giveBack(text string) bool {
	return a.send(func(dst []byte) []byte { return a.appendFinish(dst, "stop", `"recomputed"`, text) }) && a.close()
}

// breakOff does to the answer what the rule says.
func (a *answer) breakOff() bool {
	out := a.sent
	if a.heldBack() != "" {
		out--
	}
	if tell := a.life.engine.cfg.Hooks.OnBreak; tell != nil && out > 0 {
		tell(a.answer, a.from+out)
	}
	if a.lazy && !a.open() {
		return false
	}
	switch a.rule.Fault {
	case Hang:
		return a.x.Hang()
	case Reset:
		if a.r.stream && a.rule.phase() == PhaseInsideChunk {
			a.x.HalfEvent(func(dst []byte) []byte { return a.appendTokens(dst, a.sent+1, false, "") })
			_ = a.x.Pause(20 * time.Millisecond) // lets the half arrive: a reset discards what is on its way
		}
		return a.x.Reset()
	}
	a.letGo()
	switch {
	case a.rule.Fault == ErrorEvent:
		return a.failed(refuse(500, "Internal server error"), a.rule.shape(a.life.engine.cfg))
	case a.r.stream:
		return a.breakStream()
	}
	return a.breakWhole()
}

func (a *answer) breakStream() bool {
	switch a.rule.Fault {
	case SilentEnd:
		return a.x.EndStream()
	case FinishError:
		return a.send(func(dst []byte) []byte { return a.appendFinish(dst, "error", "null", "") }) && a.done()
	case Recomputed:
		return a.giveBack(a.heldBack())
	}
	return a.close() // MissingFinish
}

// breakWhole is for an answer that does not stream.
func (a *answer) breakWhole() bool {
	n := min(a.rule.AfterTokens, a.want)
	switch a.rule.Fault {
	case FinishError:
		return a.whole(n, "error", "null", nil)
	case Recomputed:
		return a.whole(n, "stop", `"recomputed"`, nil)
	case MissingFinish:
		return a.whole(n, "", "null", nil)
	}
	a.x.Close = true // SilentEnd: half of the body
	a.x.Promise(a.r.contentType(), `{"id":`)
	return false
}

// failed tells of an error in the middle of a request: as an event once the
// status is out.
func (a *answer) failed(e *apiError, shape ErrorShape) bool {
	if !a.r.stream {
		return a.x.failAs(e, shape)
	}
	if a.sglang() {
		shape = ShapeNew // as an event, whatever its bodies look like
	}
	body, _ := e.body(shape)
	return a.send(func(dst []byte) []byte { return append(append(append(dst, "data: "...), body...), "\n\n"...) }) && a.done()
}

// collect waits for the whole answer of a request that does not stream.
func (a *answer) collect(j *group.Job) bool {
	for {
		end := j.End.Load()
		made := int(j.Made.Load())
		if a.breaks && (made >= a.rule.AfterTokens && made > 0 || end != group.GoingOn) {
			return a.breakOff()
		}
		switch end {
		case group.Finished:
			a.countCached(j)
			return a.whole(a.want, a.finish, a.stopReason, a.appendHandBack(nil, a.want))
		case group.Recomputed:
			return a.whole(made, "stop", `"recomputed"`, nil)
		}
		if !waitFor(a, j.Wake) {
			return false
		}
	}
}

// countCached takes over what a request without a hand-off found in the cache.
func (a *answer) countCached(j *group.Job) {
	if a.r.leg != LegDecode {
		a.cached = int(j.Cached.Load())
	}
}

// whole answers in one JSON object. handoff is nil but for probes.
func (a *answer) whole(n int, finish, stopReason string, handoff []byte) bool {
	if rule, hit := a.r.troubles.find(Reset, PhaseAfterHeaders); hit {
		a.x.Promise(a.r.contentType(), "")
		_ = a.x.Pause(max(20*time.Millisecond, rule.delay()))
		return a.x.Reset()
	}
	if _, hit := a.r.troubles.find(Hang, PhaseAfterHeaders); hit {
		a.x.Promise(a.r.contentType(), "")
		return a.x.Hang()
	}
	body := a.appendWhole(nil, n, finish, stopReason, handoff)
	return a.x.Answer(200, a.r.contentType(), body)
}
