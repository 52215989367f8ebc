package load

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Run sends the requests and returns when the last one has ended. If ctx ends
// it leaves those in flight (Stopped) and returns what it has. An error means
// that nothing was sent.
func Run(ctx context.Context, cfg Config) (*Result, error) {
	cfg = cfg.withDefaults()
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	r := newRunner(cfg)
	defer r.client.CloseIdleConnections()
	if r.cfg.Model == "" && r.cfg.Own == nil {
		var err error
		if r.cfg.Model, err = r.firstModel(ctx); err != nil {
			return nil, err
		}
	}
	r.start = time.Now()
	if cfg.Concurrency > 0 || cfg.Own != nil {
		r.closedLoop(ctx)
	} else {
		r.openLoop(ctx)
	}
	return r.score.result(&r.cfg, r.start), nil
}

// runner is one run. Its score is behind one lock, taken once a request.
type runner struct {
	cfg    Config
	client *http.Client
	run    string // part of the request ids, another one each run
	start  time.Time

	next   atomic.Int64 // index of the next request
	tokens atomic.Int64 // received so far, by whichever request
	score  score
}

func newRunner(cfg Config) *runner {
	most := max(cfg.Concurrency, 64)
	if cfg.Concurrency == 0 {
		most = cfg.MaxOutstanding
	}
	r := &runner{cfg: cfg}
	r.cfg.URLs = make([]string, len(cfg.URLs))
	for i, u := range cfg.URLs {
		r.cfg.URLs[i] = strings.TrimSuffix(strings.TrimSuffix(u, "/"), "/v1")
	}
	// net/http costs no more CPU an event than sockets of our own: system calls
	// are nearly all of it. No proxy, no compression, no HTTP/2: those would hide
	// what the server does.
	r.client = &http.Client{
		Transport: &http.Transport{
			DialContext:         cfg.dial,
			MaxIdleConns:        most,
			MaxIdleConnsPerHost: most,
			IdleConnTimeout:     2 * time.Second, // servers keep one for 5 s or more: never send on one about to close
			DisableCompression:  true,
			TLSHandshakeTimeout: 10 * time.Second,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	var id [4]byte
	_, _ = rand.Read(id[:]) // never fails
	r.run = hex.EncodeToString(id[:])
	r.score.init(&r.cfg, &r.tokens)
	return r
}

// closedLoop keeps Concurrency requests in the system.
func (r *runner) closedLoop(ctx context.Context) {
	var wg sync.WaitGroup
	for range r.cfg.Concurrency {
		wg.Go(func() {
			var x exchange
			for i, ok := r.nextRequest(ctx); ok; i, ok = r.nextRequest(ctx) {
				if !r.one(ctx, &x, i, 0) {
					r.backOff(ctx)
				}
			}
		})
	}
	wg.Wait()
}

// backOff is what a client does that was not served, as Retry-After asks for.
func (r *runner) backOff(ctx context.Context) {
	select {
	case <-time.After(r.cfg.Backoff):
	case <-ctx.Done():
	}
}

// openLoop sends requests when they are due, whatever has come back.
func (r *runner) openLoop(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	places := make(chan struct{}, r.cfg.MaxOutstanding)
	pool := sync.Pool{New: func() any { return new(exchange) }}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for i, ok := r.nextRequest(ctx); ok; i, ok = r.nextRequest(ctx) {
		due := r.start.Add(r.cfg.at(i))
		if r.cfg.Duration > 0 && due.Sub(r.start) > r.cfg.Duration {
			return
		}
		timer.Reset(time.Until(due))
		select {
		case <-timer.C:
		case <-ctx.Done():
			return
		}
		select {
		case places <- struct{}{}:
		case <-ctx.Done():
			return
		}
		lag := time.Since(due)
		wg.Go(func() {
			x := pool.Get().(*exchange)
			r.one(ctx, x, i, lag)
			pool.Put(x)
			<-places
		})
	}
}

// nextRequest returns the index of the next request, false when there is none.
func (r *runner) nextRequest(ctx context.Context) (int, bool) {
	if ctx.Err() != nil || r.cfg.Duration > 0 && time.Since(r.start) > r.cfg.Duration {
		return 0, false
	}
	i := int(r.next.Add(1)) - 1
	return i, r.cfg.Count == 0 || i < r.cfg.Count
}

// one sends request i and books how it ended; ok unless it failed.
func (r *runner) one(ctx context.Context, x *exchange, i int, lag time.Duration) (ok bool) {
	a := r.cfg.ask(i)
	r.score.sending(time.Now(), lag)
	f := x.do(ctx, r, &a)
	r.score.ended(&a, x, f, r.requestID(i))
	return f == nil || !f.kind.Failed()
}

// ttft is what planned cancels aim by.
func (r *runner) ttft() time.Duration {
	if r.cfg.Cancel.TTFT > 0 {
		return r.cfg.Cancel.TTFT
	}
	if d := time.Duration(r.score.typicalTTFT.Load()); d > 0 {
		return d
	}
	return 50 * time.Millisecond
}

// server is the URL of the server whose turn is at request i.
func (r *runner) server(i int) string { return r.cfg.URLs[i%len(r.cfg.URLs)] }

func (r *runner) url(a *ask) string {
	if a.chat {
		return r.server(a.index) + "/v1/chat/completions"
	}
	return r.server(a.index) + "/v1/completions"
}

func (r *runner) requestID(i int) string { return "load-" + r.run + "-" + strconv.Itoa(i) }

func (r *runner) header(req *http.Request, i int) {
	req.Header["Content-Type"] = []string{"application/json"}
	req.Header["X-Request-Id"] = []string{r.requestID(i)}
	if r.cfg.APIKey != "" {
		req.Header["Authorization"] = []string{"Bearer " + r.cfg.APIKey}
	}
}

// firstModel asks the first server what it serves.
func (r *runner) firstModel(ctx context.Context) (string, error) {
	where := r.cfg.URLs[0] + "/v1/models"
	ctx, stop := context.WithTimeout(ctx, 10*time.Second)
	defer stop()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, where, nil)
	if err != nil {
		return "", fmt.Errorf("load: %w", err)
	}
	if r.cfg.APIKey != "" {
		req.Header.Set("Authorization", "Bearer "+r.cfg.APIKey)
	}
	resp, err := r.client.Do(req)
	if err != nil {
		return "", fmt.Errorf("load: asking for the model: %w; is the server up?", err)
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 4<<20))
	if err != nil {
		return "", fmt.Errorf("load: %s: %w", where, err)
	}
	if resp.StatusCode != http.StatusOK {
		return "", fmt.Errorf("load: %s answered %s: %s; name the model yourself", where, resp.Status, clip(body))
	}
	var list struct {
		Data []struct {
			ID string `json:"id"`
		} `json:"data"`
	}
	if err := json.Unmarshal(body, &list); err != nil {
		return "", fmt.Errorf("load: %s: %w; name the model yourself", where, err)
	}
	if len(list.Data) == 0 || list.Data[0].ID == "" {
		return "", errors.New("load: " + where + " lists no model; is an engine up?")
	}
	return list.Data[0].ID, nil
}
