// Package fleetcall sends an operator's call to all engines, or to the engines of a group, e.g. to
// pause them, to empty their caches or to resume them. The config says what a call of each path
// does to an engine, so that the proxy can act accordingly: it sends nothing to paused engines, and
// forgets what was in an emptied cache.
//
// The roster holds the pause of a group. A proxy that restarts has forgotten the pause. vLLM
// engines then report themselves that they are paused (engine.ErrPaused); an operator has to pause
// or resume other engines once more.
package fleetcall

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"sync"
	"time"
	"unicode/utf8"

	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet/roster"
)

// Deps is what a Caller needs of the proxy.
type Deps struct {
	Context  context.Context // ends with the proxy
	Go       func(f func())  // runs f, and the end of the proxy waits for it
	Log      *zap.Logger
	Client   *engine.Client
	Settings func() *config.Config
	Fleet    Fleet
	Forget   func(candidates []string, workers []int32) // forgets what the proxy knows of the contents of these prefix caches
}

// Fleet knows which engines exist, and which of them are paused. Pause stops new requests to a
// group; an empty group means all engines. Resume ends the pause, except for the engines in
// unresumed, which did not resume. RecordEmptiedCaches records that engines have dropped their KV.
type Fleet interface {
	Now() *roster.Snapshot
	Pause(group, path string)
	Resume(group string, unresumed []string)
	RecordEmptiedCaches(keys []string)
}

// Caller calls engines, for one operator at a time.
type Caller struct {
	deps Deps
	mu   sync.Mutex
	busy string // text for people about the call under way; empty: there is none
}

// New returns a Caller, which has no call under way.
func New(d Deps) *Caller { return &Caller{deps: d} }

// mostBody bounds how much of an engine's answer the result has, in bytes. The rest is cut off.
const mostBody = 16 << 10

// Do makes a call for an operator. by is the operator's name in the log. It returns once every
// engine has answered, or fleet_call.timeout is over. If ctx ends before, the call still goes on,
// because otherwise only a part of the engines might be paused.
func (c *Caller) Do(ctx context.Context, call Call, by string) (Result, *Refusal) {
	s := c.deps.Settings()
	p, refusal := call.check(s.FleetCall.Paths, c.deps.Fleet.Now())
	if refusal != nil {
		return Result{}, refusal
	}
	if refusal = c.begin(p, s.FleetCall.Timeout); refusal != nil { // another call is under way
		return Result{}, refusal
	}
	done := make(chan Result, 1) // has room for the result, because nothing receives it once ctx has ended
	c.deps.Go(func() {
		r := c.carryOut(p, &s.FleetCall, s.Limits.ConnectTimeout, by)
		c.end() // before the caller gets the result, because the caller may make the next call at once
		done <- r
	})
	select {
	case r := <-done:
		return r, nil
	case <-ctx.Done():
		return Result{}, &Refusal{http.StatusConflict, "call_refused", "the call goes on without its caller"}
	}
}

// begin reserves the Caller for a call, and refuses if another call is under way. limit is how long
// the call may take.
func (c *Caller) begin(p *checkedCall, limit time.Duration) *Refusal {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.busy != "" {
		return &Refusal{http.StatusConflict, "call_refused", "another call is under way: " + c.busy + "; call again after it"}
	}
	c.busy = fmt.Sprintf("%s, which ends at %s at the latest", p.Path, time.Now().Add(limit).UTC().Format(time.RFC3339))
	return nil
}

// end lets the Caller accept the next call.
func (c *Caller) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.busy = ""
}

// carryOut makes a call. If the call pauses engines, the proxy first stops sending them requests.
// After the answers it forgets caches that were emptied. It ends a pause if endsPause says so,
// except for the engines that did not resume: these go on getting no requests. It calls all engines
// at the same time, because vLLM ranks that step together also pause together: none answers before
// all of them have got the call (0.32 and 0.33, DPEngineCoreProc._pause_complete in
// v1/engine/core.py). connect limits the time to connect to an engine, and by is the operator's
// name in the log.
func (c *Caller) carryOut(p *checkedCall, s *config.FleetCall, connect time.Duration, by string) Result {
	began := time.Now()
	log := c.deps.Log.With(zap.String("path", p.Path), zap.String("method", p.Method), zap.String("group", p.Group), zap.String("by", by))
	log.Info("an operator calls engines", zap.Int("engines", len(p.targets)))
	before := c.deps.Fleet.Now()
	if p.does(config.CallPauses) {
		c.deps.Fleet.Pause(p.Group, p.Path)
	}
	ctx, stop := context.WithTimeout(c.deps.Context, s.Timeout)
	defer stop()
	answers := make([]Answer, len(p.targets))
	var all sync.WaitGroup
	for i := range p.targets {
		all.Go(func() { answers[i] = c.callEngine(ctx, p, &p.targets[i], connect, s.Timeout) })
	}
	all.Wait()
	if p.does(config.CallEmpties) { // only now, because requests that end before the engines act still leave KV in the caches
		keys := p.keysWhere(func(i int) bool { return answers[i].mayHaveActed() })
		c.deps.Fleet.RecordEmptiedCaches(keys)
		c.deps.Forget(c.deps.Fleet.Now().Caches(keys))
	}
	if ends, unresumed := p.endsPause(answers, before); ends {
		c.deps.Fleet.Resume(p.Group, unresumed)
	}
	r := c.result(p, answers)
	r.logTo(log.With(zap.Int("engines", len(answers)), zap.Duration("took", time.Since(began))))
	return r
}

// result returns the result of a call, and which engines are paused after it.
func (c *Caller) result(p *checkedCall, answers []Answer) Result {
	r := Result{Path: p.Path, Group: p.Group, Engines: answers}
	for _, pause := range c.deps.Fleet.Now().Pauses() {
		r.Paused = append(r.Paused, pause.String())
	}
	r.Done = !slices.ContainsFunc(answers, func(a Answer) bool { return !a.Done })
	return r
}

// mostNamed is how many of the failed engines the log names.
const mostNamed = 8

// logTo logs whether all engines did what they were asked for, and why some did not.
func (r *Result) logTo(log *zap.Logger) {
	log = log.With(zap.Strings("paused", r.Paused))
	if r.Done {
		log.Info("all engines did what an operator called for")
		return
	}
	var failed []string
	for i := range r.Engines {
		if a := &r.Engines[i]; !a.Done {
			failed = append(failed, a.Engine+": "+a.Error)
		}
	}
	log.Warn("some engines did not do what an operator called for", zap.Int("failed", len(failed)),
		zap.Strings("why", failed[:min(len(failed), mostNamed)]))
}

// callEngine makes the call to one engine. If the call fails, the Answer says why in Error. ctx
// ends with the call's time limit, whose length is limit, and connect limits the time to connect.
func (c *Caller) callEngine(ctx context.Context, p *checkedCall, to *target, connect, limit time.Duration) Answer {
	began := time.Now()
	a := Answer{Engine: to.id, Restarted: to.hasRestarted(c.deps.Fleet.Now())}
	call := c.deps.Client.NewCall(to.target).Fresh() // a kept-alive connection may be closed already, and the call must not be sent twice
	stopWaiting := context.AfterFunc(ctx, call.Abort)
	defer stopWaiting()
	var body [][]byte
	var headers []engine.Header
	if len(p.Body) > 0 {
		body, headers = [][]byte{p.Body}, []engine.Header{{Name: "Content-Type", Value: "application/json"}}
	}
	resp, err := call.Do(p.Method, p.Path, headers, body, engine.Deadlines{Connect: connect})
	var text []byte
	if err == nil {
		defer resp.Close()
		a.sent, a.Status = true, resp.StatusCode()
		text, err = io.ReadAll(io.LimitReader(resp, mostBody))
	}
	var failed *engine.Error
	if errors.As(err, &failed) {
		a.sent = a.sent || failed.Sent // a call that was sent may have acted, even if no answer came
	}
	a.Ms = float64(time.Since(began).Microseconds()) / 1000
	if err != nil {
		a.Error = c.errorText(ctx, err, limit)
	}
	a.Body = text
	a.setDone()
	if len(text) > 0 && !isFlatJSON(text) {
		a.Body, _ = json.Marshal(string(text)) // cannot fail: a string always marshals
	}
	return a
}

// mostLevels is how many levels of lists and objects a body may have that is given as JSON. The
// result is indented, so that each of them makes it larger.
const mostLevels = 8

// isFlatJSON says whether the result may have a body as the JSON that it is. A body that is no
// JSON, or was cut off, would make the result invalid.
func isFlatJSON(text []byte) bool {
	if !utf8.Valid(text) || !json.Valid(text) {
		return false
	}
	levels := 0
	tokens := json.NewDecoder(bytes.NewReader(text))
	tokens.UseNumber() // a float64 does not hold every number
	for {
		token, err := tokens.Token()
		switch {
		case err != nil:
			return errors.Is(err, io.EOF)
		case token == json.Delim('['), token == json.Delim('{'):
			if levels++; levels > mostLevels {
				return false
			}
		case token == json.Delim(']'), token == json.Delim('}'):
			levels--
		}
	}
}

// errorText says for people why a call to an engine failed with err. ctx ends with the call's time
// limit, and limit is its length. After the limit, the engine may still do what it was asked for,
// and the text says so.
func (c *Caller) errorText(ctx context.Context, err error, limit time.Duration) string {
	switch {
	case c.deps.Context.Err() != nil:
		return "the proxy ended meanwhile"
	case ctx.Err() != nil:
		return fmt.Sprintf("no answer came within fleet_call.timeout (%v); it may come to do it yet", limit)
	}
	return err.Error()
}
