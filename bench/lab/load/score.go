package load

import (
	"maps"
	"sync"
	"sync/atomic"
	"time"
)

// score books how requests went.
type score struct {
	cfg    *Config
	tokens *atomic.Int64 // received so far, by whichever request
	// typicalTTFT is a moving mean in ns, read without the lock.
	typicalTTFT atomic.Int64

	mu       sync.Mutex
	progress Progress
	kinds    map[Kind]int
	cancels  map[Phase]Left
	failures []Failure
	wrong    int
	events   int64
	lag      histogram

	all, window latencies

	// The prompts' lengths, as made and as the server counted them.
	asked, reported int64

	first, warm, last      time.Time // sends; warm: when Config.Warm said yes
	tokensWarm, tokensLast int64     // received until then
}

// latencies of the requests that ended OK.
type latencies struct {
	requests             int
	ttft, tpot, itl, e2e histogram
}

func (s *score) init(cfg *Config, tokens *atomic.Int64) {
	s.cfg, s.tokens = cfg, tokens
	s.progress.Total = cfg.Count
	s.kinds, s.cancels = map[Kind]int{}, map[Phase]Left{}
}

// sending books a request that is about to go out, lag too late.
func (s *score) sending(now time.Time, lag time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.progress.Sent++; s.first.IsZero() {
		s.first = now
	}
	if now.After(s.last) {
		s.last, s.tokensLast = now, s.tokens.Load()
	}
	s.lag.add(lag)
}

// ended books how a went; f is nil if all was right.
func (s *score) ended(a *ask, x *exchange, f *fault, requestID string) {
	if !a.stream {
		s.tokens.Add(int64(x.tokens))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.progress.Ended++
	s.events += x.events
	kind := OK
	if f != nil {
		kind = f.kind
	}
	s.kinds[kind]++
	if a.cancel != "" {
		left := s.cancels[a.cancel]
		left.count(kind, x)
		s.cancels[a.cancel] = left
	}
	switch {
	case kind == OK:
		s.progress.OK++
		s.measure(a, x)
	case kind == Cancelled:
		s.progress.Cancelled++
	case kind.Failed():
		s.progress.Failed++
		if kind.Wrong() {
			s.wrong++
		}
		if len(s.failures) < s.cfg.KeepFailures {
			s.failures = append(s.failures, failureOf(a, x, f, requestID))
		}
	}
	if s.warm.IsZero() && s.isWarm() {
		s.warm, s.tokensWarm = x.end, s.tokens.Load()
	}
	if s.cfg.OnProgress != nil {
		s.cfg.OnProgress(s.progress)
	}
}

func (s *score) isWarm() bool {
	switch {
	case s.cfg.Warm != nil:
		return s.cfg.Warm(s.progress)
	case s.cfg.Concurrency > 0:
		return s.progress.Ended >= s.cfg.Concurrency
	case s.cfg.Count == 0:
		return time.Since(s.first) >= s.cfg.Duration/8
	}
	return s.progress.Ended >= max(1, s.cfg.Count/8)
}

func (s *score) measure(a *ask, x *exchange) {
	s.all.add(a, x)
	if !s.warm.IsZero() && !x.sent.Before(s.warm) {
		s.window.add(a, x)
	}
	if x.follower.hasUsage {
		s.asked += int64(a.req.Prompt)
		s.reported += int64(x.follower.usage.prompt)
	}
	if a.stream && !x.first.IsZero() {
		ttft, mean := int64(x.first.Sub(x.sent)), s.typicalTTFT.Load()
		if mean == 0 {
			mean = ttft
		}
		s.typicalTTFT.Store(mean + (ttft-mean)/8)
	}
}

func (l *latencies) add(a *ask, x *exchange) {
	l.requests++
	l.e2e.add(x.end.Sub(x.sent))
	if !a.stream || x.first.IsZero() {
		return
	}
	l.ttft.add(x.first.Sub(x.sent))
	if x.tokens > 1 {
		l.tpot.add(x.last.Sub(x.first) / time.Duration(x.tokens-1))
	}
	for _, gap := range x.gaps {
		l.itl.add(gap)
	}
}

// result is the report of a run that has ended.
func (s *score) result(cfg *Config, start time.Time) *Result {
	s.mu.Lock()
	defer s.mu.Unlock()
	end := time.Now()
	p := s.progress
	r := &Result{
		Loop: "open", Concurrency: cfg.Concurrency,
		Sent: p.Sent, OK: p.OK, Failed: p.Failed, Wrong: s.wrong, Cancelled: p.Cancelled, Stopped: s.kinds[Stopped],
		Kinds: maps.Clone(s.kinds), Cancels: maps.Clone(s.cancels), Failures: s.failures,
		Start: start, FirstSend: s.first, Warm: s.warm, LastSend: s.last, End: end,
		Events: s.events, PromptTokens: s.asked, ReportedPromptTokens: s.reported,
		All: s.all.section(start, end, s.tokens.Load()),
	}
	if cfg.Concurrency > 0 {
		r.Loop = "closed"
	} else {
		r.Lag = s.lag.millis()
	}
	if !s.warm.IsZero() && s.last.After(s.warm) {
		w := s.window.section(s.warm, s.last, s.tokensLast-s.tokensWarm)
		r.Window = &w
	}
	return r
}

func (l *latencies) section(from, to time.Time, tokens int64) Section {
	seconds := to.Sub(from).Seconds()
	c := Section{From: from, To: to, Seconds: seconds, Requests: l.requests, OutputTokens: tokens,
		TTFT: l.ttft.millis(), TPOT: l.tpot.millis(), ITL: l.itl.millis(), E2E: l.e2e.millis()}
	if seconds > 0 {
		c.TokensPerS = float64(tokens) / seconds
		c.RequestsPerS = float64(l.requests) / seconds
	}
	return c
}
