package refengine

import (
	"encoding/json"
	"net/http"
	"strconv"
	"sync"
	"time"
)

// What real engines do when they are paused, and when a cache is emptied that requests use: vLLM
// 0.32 and 0.33 (entrypoints/rl/online/api_router.py, entrypoints/serve/dev/cache/api_router.py,
// v1/engine/core.py), SGLang 0.5.23 (entrypoints/http_server.py, managers/tokenizer_manager.py,
// managers/scheduler.py).

// pausing is whether a life is paused.
type pausing struct {
	*life
	mu   sync.Mutex
	mode string        // empty: it is not
	over chan struct{} // closed when it is over
}

// Modes of a pause. The last two are SGLang's.
const (
	pauseAborts   = "abort"
	pauseWaits    = "wait"
	pauseKeeps    = "keep"
	pauseRetracts = "retract"
	pauseInPlace  = "in_place"
)

func (p *pausing) begin(mode string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mode = mode; p.over == nil {
		p.over = make(chan struct{})
	}
}

func (p *pausing) end() (mode string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	mode = p.mode
	if p.mode = ""; p.over != nil {
		close(p.over)
		p.over = nil
	}
	return mode
}

func (p *pausing) now() (mode string, over <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mode, p.over
}

// longStand is longer than any test.
const longStand = 24 * time.Hour

// holds is what happens to a request that comes while the engine is paused: it waits, but vLLM
// refuses it from 0.33 on, unless the mode is keep. done: it was answered, or its client has left.
func (p *pausing) holds(x *exchange, r *request) (done, ok bool) {
	for {
		mode, over := p.now()
		switch {
		case mode == "":
			return false, false
		case (mode == pauseAborts || mode == pauseWaits) && p.engine.cfg.Connector != SGLang && !p.engine.cfg.before(33):
			p.notify(r) // its KV connector frees what is held for it
			p.engine.seen.Forget(x.Req.Header.Get("X-Request-Id"))
			a := p.newAnswer(x, r, plan{})
			if r.stream && !a.open() { // the status is out before the core has refused it
				return true, false
			}
			return true, a.failed(refuse(503, "Generation is paused. Please retry after it resumes."), p.engine.cfg.Answers.ErrorShape)
		}
		select {
		case <-over:
		case <-x.Ctx.Done():
			return true, false
		}
	}
}

// idle says that no request and no hand-off holds KV on any rank.
func (p *pausing) idle() bool {
	for rank := range p.prefills {
		if s := p.rankStats(rank); s.Running > 0 || s.KVUsed > 0 {
			return false
		}
	}
	return true
}

// untilIdle waits until no request and no hand-off holds KV; false: they still did then, or the
// client has left.
func (p *pausing) untilIdle(x *exchange, limit time.Duration) bool {
	for end := time.Now().Add(limit); !p.idle(); {
		if !time.Now().Before(end) || !x.Pause(2*time.Millisecond) {
			return false
		}
	}
	return true
}

func (p *pausing) emptyCaches() {
	for _, r := range p.prefills {
		r.Cache.Reset()
	}
}

// servePause is POST /pause of vLLM: it answers once nothing holds KV any more, or at once with
// mode keep.
func (p *pausing) servePause(x *exchange) bool {
	q := x.Req.URL.Query()
	mode := q.Get("mode")
	if mode == "" {
		mode = pauseAborts
	}
	if mode != pauseAborts && mode != pauseWaits && mode != pauseKeeps {
		return x.Answer(422, typeJSON, []byte(`{"detail":[{"type":"literal_error","loc":["query","mode"],"msg":"Input should be 'abort', 'wait' or 'keep'"}]}`))
	}
	p.begin(mode)
	switch mode {
	case pauseKeeps:
		p.engine.core.Close(longStand)
		return x.answerJSON(map[string]string{"status": "paused"})
	case pauseAborts:
		p.bound.rids.Abort("")
	}
	if !p.untilIdle(x, longStand) {
		return false
	}
	if clears, err := strconv.ParseBool(q.Get("clear_cache")); err != nil || clears {
		p.emptyCaches()
	}
	return x.answerJSON(map[string]string{"status": "paused"})
}

func (p *pausing) serveResume(x *exchange) bool {
	p.resume()
	return x.answerJSON(map[string]string{"status": "resumed"})
}

// resume ends a pause.
func (p *pausing) resume() {
	if mode := p.end(); mode == pauseKeeps || mode == pauseInPlace || mode == pauseRetracts {
		p.engine.core.Close(0)
	}
}

func (p *pausing) serveIsPaused(x *exchange) bool {
	mode, _ := p.now()
	return x.answerJSON(map[string]bool{"is_paused": mode != ""})
}

// serveReset is POST /reset_prefix_cache of vLLM, which resets nothing while a request or a
// hand-off holds blocks.
func (p *pausing) serveReset(x *exchange) bool {
	done := p.idle()
	if done {
		p.emptyCaches()
	}
	return x.answerJSON(map[string]bool{"success": done})
}

// serveUpdateWeights takes other weights, which nothing here can tell.
func (p *pausing) serveUpdateWeights(x *exchange) bool {
	return x.answerJSON(map[string]string{"message": "Weights updated"})
}

// servePauseGeneration is that of SGLang, which wants a body. By mode abort it answers once nothing
// runs.
func (p *pausing) servePauseGeneration(x *exchange) bool {
	ask := struct{ Mode string }{pauseAborts}
	if json.Unmarshal(x.Body, &ask) != nil {
		return x.Answer(422, typeJSON, []byte(`{"detail":[{"type":"missing","loc":["body"],"msg":"Field required"}]}`))
	}
	p.begin(ask.Mode)
	if ask.Mode == pauseAborts {
		p.bound.rids.Abort("")
		if !p.untilIdle(x, longStand) {
			return false
		}
	} else {
		p.engine.core.Close(longStand)
	}
	return x.answerJSON(map[string]string{"message": "Generation paused successfully.", "status": "ok"})
}

func (p *pausing) serveContinueGeneration(x *exchange) bool {
	p.resume()
	return x.answerJSON(map[string]string{"message": "Generation continued successfully.", "status": "ok"})
}

// serveFlush is that of SGLang, which refuses while requests run, and waits for their end for as
// long as it is told to. Those that a pause has retracted hold no KV.
func (p *pausing) serveFlush(x *exchange) bool {
	wait, _ := strconv.ParseFloat(x.Req.URL.Query().Get("timeout"), 64) // without one it does not wait
	if mode, _ := p.now(); mode != pauseRetracts && !p.untilIdle(x, time.Duration(wait*float64(time.Second))) {
		return x.Ctx.Err() == nil && x.Answer(http.StatusBadRequest, "text/plain; charset=utf-8", []byte("Flush cache failed.\n"))
	}
	p.emptyCaches()
	return x.Answer(200, "text/plain; charset=utf-8", []byte("Cache flushed.\nPlease check backend logs for more details. "+
		"(When there are running or waiting requests, the operation will not be performed.)\n"))
}

// healthOfSGLang is for how long GET /health waits for a token before it says 503 (0.5.23,
// HEALTH_CHECK_TIMEOUT in entrypoints/http_server.py).
const healthOfSGLang = 20 * time.Second

// serveReady is that of SGLang.
func (p *pausing) serveReady(x *exchange) bool {
	if mode, _ := p.now(); mode != "" {
		return x.Answer(503, "", nil)
	}
	return p.serveHealth(x)
}
