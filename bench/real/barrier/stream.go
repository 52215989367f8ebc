package main

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

// request is a prompt of so many token ids and an answer of so many tokens.
type request struct{ prompt, output int }

// answer is what a client saw of a request.
type answer struct {
	sent   time.Time
	chunks []chunk
	err    error
}

// chunk is an event with tokens.
type chunk struct {
	at     time.Time
	tokens int // of the answer so far
}

// client sends requests with streamed answers.
type client struct{ *http.Client }

func newClient() client {
	return client{&http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64, IdleConnTimeout: 2 * time.Second, DisableCompression: true}, Timeout: 2 * time.Minute}}
}

// anyRank leaves the rank to whoever is asked.
const anyRank = -1

// ask sends a request and reads its answer to the end.
func (c client) ask(ctx context.Context, url string, r request, rank int) (a answer) {
	body, err := json.Marshal(map[string]any{
		"model": vllm.ModelName, "prompt": ids(r.prompt), "max_tokens": r.output, "ignore_eos": true, "temperature": 0,
		"stream": true, "stream_options": map[string]bool{"include_usage": true, "continuous_usage_stats": true},
	})
	if err != nil {
		return answer{err: err}
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		return answer{err: err}
	}
	req.Header.Set("Content-Type", "application/json")
	if rank != anyRank {
		req.Header.Set("X-Data-Parallel-Rank", strconv.Itoa(rank))
	}
	a.sent = time.Now()
	resp, err := c.Do(req)
	if err != nil {
		a.err = err
		return a
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		said, _ := io.ReadAll(io.LimitReader(resp.Body, 500))
		a.err = fmt.Errorf("%s: %s", resp.Status, said)
		return a
	}
	a.err = a.read(resp.Body, r.output)
	return a
}

// read takes down when each event came and how many tokens there were by then.
func (a *answer) read(body io.Reader, want int) error {
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
			a.chunks = append(a.chunks, chunk{time.Now(), n})
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

// ids is a prompt. Which tokens it has changes nothing: the KV that an answer is made
// from is made up, too.
func ids(n int) []int { return vllm.TokenIDs(n, rand.New(rand.NewPCG(1, uint64(n)))) }
