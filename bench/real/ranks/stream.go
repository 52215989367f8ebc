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

	"evenkeel/bench/real/vllm"
)

// Request is a prompt of so many token ids and an answer of so many tokens.
type Request struct{ Prompt, Output int }

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
type Client struct{ *http.Client }

// NewClient is one; CloseIdleConnections ends it.
func NewClient() Client {
	return Client{&http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64, IdleConnTimeout: 2 * time.Second, DisableCompression: true}, Timeout: 2 * time.Minute}}
}

// AnyRank leaves the rank to whoever is asked.
const AnyRank = -1

// Ask sends a request and reads its answer to the end.
func (c Client) Ask(ctx context.Context, url string, r Request, rank int) (a Answer) {
	body, err := json.Marshal(map[string]any{
		"model": vllm.ModelName, "prompt": ids(r.Prompt), "max_tokens": r.Output, "ignore_eos": true, "temperature": 0,
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

// ids is a prompt. Which tokens it has changes no step, for engines here have no prefix cache.
func ids(n int) []int { return vllm.TokenIDs(n, rand.New(rand.NewPCG(1, uint64(n)))) }
