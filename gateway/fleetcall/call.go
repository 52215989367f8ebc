// Package fleetcall has one call go to all engines, or to those of a group: to pause them, to empty their caches, to resume. What a call of
// a path does is part of the config, so that the proxy does its part, too: it sends nothing to engines that are paused, and believes
// nothing of what was in a cache that is empty.
//
// The pause of a group is a value of the roster. A restart of the proxy forgets it: engines of vLLM then say themselves that they are
// paused, see engine.ErrPaused. Others are to be paused, or resumed, once more.
package fleetcall

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet"
)

// Host is the proxy as its caller sees it.
type Host struct {
	Context  context.Context // ends with the proxy
	Go       func(f func())  // runs f, and the end of the proxy waits for it
	Log      *zap.Logger
	Client   *engine.Client
	Settings func() *config.Config
	Fleet    Fleet
	Forget   func(candidates []string, workers []int32) // what is known of these prefix caches
}

// Fleet knows which engines there are, and which of them are paused. Pause stops new requests to a group; an empty group means all
// engines. Resume undoes this, except for the engines in left, which did not resume. Emptied says that engines have dropped their KV.
type Fleet interface {
	Now() *fleet.Published
	Pause(group, path string)
	Resume(group string, left []string)
	Emptied(keys []string)
}

// Caller calls engines, for one operator at a time.
type Caller struct {
	host Host
	mu   sync.Mutex
	runs string // what is under way; empty: nothing is
}

// New returns a caller.
func New(h Host) *Caller { return &Caller{host: h} }

// mostBody is how much of an engine's answer is kept, in bytes.
const mostBody = 16 << 10

// Do makes a call for somebody, who is named in the log. It returns once every engine has answered, or fleet_call.timeout is over. A call
// that has begun goes on without a caller: half of the engines would be paused otherwise.
func (c *Caller) Do(ctx context.Context, call Call, by string) (Result, *Refusal) {
	s := c.host.Settings()
	p, wrong := call.planned(s.FleetCall.Paths, c.host.Fleet.Now())
	if wrong == nil {
		wrong = c.begin(p, s.FleetCall.Timeout)
	}
	if wrong != nil {
		return Result{}, wrong
	}
	done := make(chan Result, 1)
	c.host.Go(func() {
		r := c.make(p, &s.FleetCall, s.Limits.ConnectTimeout, by)
		c.end() // before the caller, who may call again at once, knows of it
		done <- r
	})
	select {
	case r := <-done:
		return r, nil
	case <-ctx.Done():
		return Result{}, &Refusal{http.StatusConflict, "call_refused", "the call goes on without its caller"}
	}
}

// begin takes the turn of a call.
func (c *Caller) begin(p *plan, limit time.Duration) *Refusal {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.runs != "" {
		return &Refusal{http.StatusConflict, "call_refused", "another call is under way: " + c.runs + "; call again after it"}
	}
	c.runs = fmt.Sprintf("%s, which ends at %s at the latest", p.Path, time.Now().Add(limit).UTC().Format(time.RFC3339))
	return nil
}

func (c *Caller) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.runs = ""
}

// make makes a call. All engines get it at once: the ranks of vLLM that step together pause together, and each answers only once all of
// them were told (0.32 and 0.33, DPEngineCoreProc._pause_complete in v1/engine/core.py).
func (c *Caller) make(p *plan, s *config.FleetCall, connect time.Duration, by string) Result {
	log, began := c.host.Log.With(zap.String("path", p.Path), zap.String("method", p.Method), zap.String("group", p.Group),
		zap.String("by", by)), time.Now()
	log.Info("an operator calls engines", zap.Int("engines", len(p.places)))
	was := c.host.Fleet.Now().Pauses()
	if p.is(config.CallPauses) {
		c.host.Fleet.Pause(p.Group, p.Path)
	}
	ctx, stop := context.WithTimeout(c.host.Context, s.Timeout)
	defer stop()
	answers := make([]Answer, len(p.places))
	var all sync.WaitGroup
	for i := range p.places {
		all.Go(func() { answers[i] = c.ask(ctx, p, &p.places[i], connect, s.Timeout) })
	}
	all.Wait()
	if p.is(config.CallEmpties) { // after the engines: what they end meanwhile is of before, too
		keys := p.keys(func(i int) bool { return answers[i].mayHaveActed() })
		c.host.Fleet.Emptied(keys)
		c.host.Forget(c.host.Fleet.Now().Caches(keys))
	}
	if end, left := p.then(answers, was); end {
		c.host.Fleet.Resume(p.Group, left)
	}
	r := Result{Done: true, Path: p.Path, Group: p.Group, Engines: answers}
	for _, o := range c.host.Fleet.Now().Pauses() {
		r.Paused = append(r.Paused, o.String())
	}
	failed := []string{}
	for i := range answers {
		if a := &answers[i]; !a.Done {
			r.Done = false
			failed = append(failed, a.Engine+": "+a.Error)
		}
	}
	if tell := log.With(zap.Int("engines", len(answers)), zap.Duration("took", time.Since(began)), zap.Strings("paused", r.Paused)); r.Done {
		tell.Info("all engines did what an operator called for")
	} else {
		tell.Warn("some engines did not do what an operator called for", zap.Int("failed", len(failed)),
			zap.Strings("why", failed[:min(len(failed), mostTold)]))
	}
	return r
}

// mostTold is how many engines the log names that failed.
const mostTold = 8

// ask calls one engine.
func (c *Caller) ask(ctx context.Context, p *plan, to *place, connect, limit time.Duration) Answer {
	a, began := Answer{Engine: to.id}, time.Now()
	engines := c.host.Fleet.Now()
	a.Restarted = slices.ContainsFunc(engines.Pauses(), func(o fleet.Pause) bool { return o.Restarted(engines.Engine(to.keys[0])) })
	call := c.host.Client.NewCall(to.target).Fresh() // one that was kept alive may end, and the call cannot be made twice
	defer context.AfterFunc(ctx, call.Abort)()
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
		a.sent = a.sent || failed.Sent
	}
	a.Ms = float64(time.Since(began).Microseconds()) / 1000
	switch {
	case err != nil && c.host.Context.Err() != nil:
		a.Error = "the proxy ended meanwhile"
	case err != nil && ctx.Err() != nil:
		a.Error = fmt.Sprintf("no answer came within fleet_call.timeout (%v); it may come to do it yet", limit)
	case err != nil:
		a.Error = err.Error()
	}
	if a.Body = text; len(text) > 0 && !json.Valid(text) {
		a.Body, _ = json.Marshal(string(text)) // text always marshals
	}
	a.judge()
	return a
}
