package ranks

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"time"

	"evenkeel/bench/rigs/real/vllm"
)

// Request is a prompt of so many token ids and an answer of so many tokens. Those of one seed begin
// alike.
type Request struct {
	Prompt, Output int
	Seed           uint64
}

// Answer is what a client saw of a request.
type Answer struct {
	Sent   time.Time
	Chunks []Chunk
	Err    error // it is not whole
}

// Chunk is an event with tokens.
type Chunk struct {
	At     time.Time
	Tokens int // of the answer so far
}

// Client sends requests with streamed answers.
type Client struct {
	*http.Client
	Model string
}

// NewClient is one of the engines that package vllm starts; CloseIdleConnections ends it.
func NewClient() Client {
	kept := &http.Transport{MaxIdleConnsPerHost: 64, IdleConnTimeout: 2 * time.Second, DisableCompression: true}
	return Client{&http.Client{Transport: kept, Timeout: 2 * time.Minute}, vllm.ModelName}
}

// AnyRank leaves the rank to whoever is asked.
const AnyRank = -1

// Ask sends a request and reads its answer to the end.
func (c Client) Ask(ctx context.Context, url string, r Request, rank int) (a Answer) {
	body, err := json.Marshal(map[string]any{
		"model": c.Model, "prompt": vllm.TokenIDs(r.Prompt, rand.New(rand.NewPCG(1+r.Seed, uint64(r.Prompt)))), "max_tokens": r.Output, "ignore_eos": true, "temperature": 0,
		"stream": true, "stream_options": map[string]bool{"include_usage": true, "continuous_usage_stats": true},
	})
	if err != nil {
		return Answer{Err: err}
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		return Answer{Err: err}
	}
	req.Header.Set("Content-Type", "application/json")
	if rank != AnyRank {
		req.Header.Set("X-Data-Parallel-Rank", strconv.Itoa(rank))
	}
	a.Sent = time.Now()
	resp, err := c.Do(req)
	if err != nil {
		a.Err = err
		return a
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		said, _ := io.ReadAll(io.LimitReader(resp.Body, 500))
		a.Err = fmt.Errorf("%s: %s", resp.Status, said)
		return a
	}
	a.Err = a.read(resp.Body, r.Output)
	return a
}

// read takes down when each event came and how many tokens there were by then.
func (a *Answer) read(body io.Reader, want int) error {
	lines := bufio.NewScanner(body)
	had := 0
	for lines.Scan() {
		event, ok := bytes.CutPrefix(lines.Bytes(), []byte("data: {"))
		if !ok {
			continue
		}
		if bytes.HasPrefix(event, []byte(`"error"`)) {
			return fmt.Errorf("an error event after %d tokens: %s", had, event)
		}
		if n := counted(event); n > had {
			had = n
			a.Chunks = append(a.Chunks, Chunk{time.Now(), n})
		}
	}
	if err := lines.Err(); err != nil {
		return err
	}
	if had != want {
		return fmt.Errorf("the answer has %d tokens, and %d were asked for", had, want)
	}
	return nil
}

// counted is the number of tokens that an event's usage tells; 0: it has none.
func counted(event []byte) (n int) {
	key := []byte(`"completion_tokens":`)
	at := bytes.LastIndex(event, key)
	if at < 0 {
		return 0
	}
	for _, c := range event[at+len(key):] {
		if c < '0' || c > '9' {
			break
		}
		n = 10*n + int(c-'0')
	}
	return n
}

// settled is how long after the last of some answers began their steps are counted: that in which
// it began is longer.
const settled = 100 * time.Millisecond

// Together is the mean time between two tokens of answers while all of them go on, and when that
// was. They have so many tokens then.
func Together(answers []*Answer) (ms float64, tokens int, from, to time.Time, err error) {
	for i, a := range answers {
		if a.Err != nil {
			return 0, 0, from, to, a.Err
		}
		first, last := a.Chunks[0].At, a.Chunks[len(a.Chunks)-1].At
		if first.After(from) {
			from = first
		}
		if i == 0 || last.Before(to) {
			to = last
		}
	}
	from = from.Add(settled)
	var sum time.Duration
	for _, a := range answers {
		for i := 1; i < len(a.Chunks); i++ {
			if x, y := a.Chunks[i-1], a.Chunks[i]; !x.At.Before(from) && !y.At.After(to) {
				sum += y.At.Sub(x.At)
				tokens += y.Tokens - x.Tokens
			}
		}
	}
	if tokens == 0 {
		return 0, 0, from, to, fmt.Errorf("no step had all %d requests", len(answers))
	}
	return sum.Seconds() * 1e3 / float64(tokens), tokens / len(answers), from, to, nil
}
