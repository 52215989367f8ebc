// Package load sends requests of a trace to an OpenAI-compatible server and
// checks every answer token by token against the reference engines' language
// (bench/lab/reftext): text, order, end, counts. It measures what a client sees and
// says of every request that did not end well what went wrong.
package load

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"time"

	"evenkeel/bench/lab/trace"
)

// Config says what to send where. Either Concurrency (closed loop) or the
// arrival times of the requests (open loop) set the pace.
type Config struct {
	URLs   []string // servers, taken in turn; without path or with the /v1 prefix's parent
	APIKey string
	Model  string // "": the first of /v1/models

	Requests      []trace.Request // in order, again from the start where Count is larger
	Own           Own             // sends other requests instead, in a closed loop; nil: Requests are sent
	Count         int             // how many to send; 0: len(Requests), or without end if Duration or Own is set
	Duration      time.Duration   // send for so long; 0: until Count
	SharePrefixes bool            // blocks with equal HashIDs get equal text; the last one is always unique
	MaxPrompt     int             // longer prompts are cut to so many tokens; 0: never
	MaxOutput     int             // longer answers likewise; 0: never

	Concurrency    int           // closed loop: requests in the system
	Backoff        time.Duration // closed loop: how long a client that was refused waits before its next request
	Rate           float64       // open loop: arrival times are scaled to so many requests a second; 0: as they are
	MaxOutstanding int           // open loop: beyond it requests are sent late (Result.Lag); 0: 8192

	Chat   float64 // share sent to /v1/chat/completions, the rest to /v1/completions
	Stream float64 // share with stream: true
	Usage  float64 // share of the streamed ones that asks for usage
	Cancel Cancel

	Chunked bool // an answer in one piece may come without its length, as from proxies that read it bit by bit

	Seed    uint64        // of prompts and of who is what; equal seeds send equal requests
	Timeout time.Duration // of a request as a whole; 0: 10 minutes
	Check   Check         // "": CheckText

	// Warm is asked after every request until it says yes: from then until the
	// last send is Result.Window. nil: once as many have ended as are in the
	// system (closed loop), or an eighth of Count, or of Duration (open loop).
	Warm func(Progress) bool
	// OnProgress is called after every request, never twice at a time.
	OnProgress func(Progress)
	// KeepFailures is how many failures Result lists; 0: 20.
	KeepFailures int

	dial func(ctx context.Context, network, addr string) (net.Conn, error) // nil: the network; a test has pipes
}

// Own sends request i of the caller's own to a server, judges the answer, and says how the request
// ended. The detail is for people, of one that did not end well. What a Config says of requests and
// answers does not apply.
type Own func(ctx context.Context, url string, i int) (kind Kind, detail string)

// Progress counts requests so far. Total is 0 when only Duration ends the run.
type Progress struct {
	Total, Sent, Ended, OK, Failed, Cancelled int
}

// Phase is where in a request's life a planned cancel aims at.
type Phase string

// The phases, in order. A client cannot see the first three apart: they are
// aimed at by time, as shares of the time to first token seen so far.
const (
	Waiting      Phase = "waiting"      // for prefill: 0 to 0.3 of it
	Pooled       Phase = "pooled"       // 0.3 to 0.8
	Transferring Phase = "transferring" // 0.8 to 1, and if the answer begins earlier, at once
	Streaming    Phase = "streaming"    // after some of the events
)

// Phases lists all of them.
func Phases() []Phase { return []Phase{Waiting, Pooled, Transferring, Streaming} }

// Cancel plans requests that their client leaves.
type Cancel struct {
	Share  float64
	Phases []Phase       // drawn evenly; nil: all
	TTFT   time.Duration // taken as the time to first token; 0: learned, from 50 ms
}

func (c Config) withDefaults() Config {
	if c.Count == 0 && c.Duration == 0 {
		c.Count = len(c.Requests)
	}
	c.MaxOutstanding = cmp.Or(c.MaxOutstanding, 8192)
	c.Timeout = cmp.Or(c.Timeout, 10*time.Minute)
	c.Check = cmp.Or(c.Check, CheckText)
	c.KeepFailures = cmp.Or(c.KeepFailures, 20)
	if len(c.Cancel.Phases) == 0 {
		c.Cancel.Phases = Phases()
	}
	return c
}

// Validate says what to change in a configuration that makes no sense.
func (c Config) Validate() error {
	if len(c.URLs) == 0 {
		return errors.New("load: no URL to send to")
	}
	for _, raw := range c.URLs {
		u, err := url.Parse(raw)
		if err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
			return fmt.Errorf("load: %q is no URL like http://127.0.0.1:8000", raw)
		}
	}
	if len(c.Requests) == 0 && c.Own == nil {
		return errors.New("load: no requests to send")
	}
	for i, r := range c.Requests {
		if r.Prompt < 1 || r.Output < 1 {
			return fmt.Errorf("load: request %d has %d prompt and %d output tokens; each needs at least 1", i, r.Prompt, r.Output)
		}
	}
	for name, share := range map[string]float64{"chat": c.Chat, "stream": c.Stream, "usage": c.Usage, "cancel": c.Cancel.Share} {
		if !(share >= 0 && share <= 1) {
			return fmt.Errorf("load: the %s share is %v; it goes from 0 to 1", name, share)
		}
	}
	for _, p := range c.Cancel.Phases {
		if !slices.Contains(Phases(), p) {
			return fmt.Errorf("load: unknown phase %q to cancel in; use %v", p, Phases())
		}
	}
	switch {
	case c.Concurrency < 0 || c.Count < 0 || c.MaxOutstanding < 0 || c.MaxPrompt < 0 || c.MaxOutput < 0 || c.KeepFailures < 0:
		return errors.New("load: a count is negative")
	case !(c.Rate >= 0) || c.Duration < 0 || c.Timeout < 0:
		return errors.New("load: a rate or duration is negative")
	case c.Concurrency > 0 && c.Rate > 0:
		return errors.New("load: Concurrency (closed loop) and Rate (open loop) exclude each other")
	case c.Check != "" && c.Check != CheckText && c.Check != CheckShape:
		return fmt.Errorf("load: unknown check %q; use %s or %s", c.Check, CheckText, CheckShape)
	}
	return nil
}
