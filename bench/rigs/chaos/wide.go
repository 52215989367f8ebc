package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"time"

	"evenkeel/bench/lab/reftext"
	"evenkeel/bench/rigs/testbed"
)

// errTold is a failure that the client was told of.
var errTold = errors.New("told")

// wideOnce asks for several answers in one request, n or a list of prompts, and
// checks that each stands under its own index.
func wideOnce(url string, client *http.Client, rng *rand.Rand) error {
	stream, tokens := rng.IntN(2) == 0, 5+rng.IntN(30)
	path, members := "/v1/completions", map[string]any{"model": model, "max_tokens": tokens, "ignore_eos": true, "stream": stream}
	var keys []uint64
	one := func(chat bool, more map[string]any) { // one of the answers, as if asked for alone
		alone := maps.Clone(members)
		delete(alone, "n")
		maps.Copy(alone, more)
		body, _ := json.Marshal(alone) // of plain values
		p, err := reftext.Render(chat, body)
		if err != nil {
			panic(err) // ours is a valid request
		}
		keys = append(keys, p.Answer)
	}
	answers := 2 + rng.IntN(3)
	switch rng.IntN(3) {
	case 0: // several prompts
		var prompts []string
		for range answers {
			prompts = append(prompts, reftext.MakePrompt(rng.Uint64()>>8, 5+rng.IntN(40)))
			one(false, map[string]any{"prompt": prompts[len(prompts)-1]})
		}
		members["prompt"] = prompts
	case 1: // several answers to one
		members["prompt"], members["n"], members["seed"] = reftext.MakePrompt(rng.Uint64()>>8, 5+rng.IntN(40)), answers, 5
		for i := range answers {
			one(false, map[string]any{"seed": 5 + i})
		}
	default: // to a chat
		path = "/v1/chat/completions"
		members["messages"] = []any{map[string]string{"role": "user", "content": reftext.MakePrompt(rng.Uint64()>>8, 5+rng.IntN(40))}}
		members["n"], members["seed"] = answers, 5
		for i := range answers {
			one(true, map[string]any{"seed": 5 + i})
		}
	}
	body, err := json.Marshal(members)
	if err != nil {
		return err
	}
	answer, err := testbed.Do(context.Background(), client, http.MethodPost, url+path, body, "Authorization", "Bearer "+callers[1].key())
	if err != nil {
		return fmt.Errorf("%s: cut off, with %d bytes: %w", path, len(answer.Body), err)
	}
	got, err := read(answer.Status, stream, answer.Body)
	if got == nil || err != nil && !errors.Is(err, errTold) {
		return err
	}
	for i, key := range keys {
		n, textErr := reftext.Check(key, 0, got.text[i])
		switch {
		case textErr != nil && err == nil, textErr != nil && n == 0 && got.text[i] != "":
			return fmt.Errorf("%s: answer %d of %d is not its own: %w: %s", path, i, len(keys), textErr, body)
		case err == nil && (n != tokens || got.finish[i] == ""):
			return fmt.Errorf("%s: answer %d of %d has %d of %d tokens, finish_reason %q: %s", path, i, len(keys), n, tokens, got.finish[i], body)
		}
	}
	if len(got.text) > len(keys) {
		return fmt.Errorf("%s: %d answers, %d asked for: %s", path, len(got.text), len(keys), body)
	}
	return err
}

// answers are the choices of an answer, by index.
type answers struct{ text, finish map[int]string }

// read takes an answer apart. errTold says that it is an error or ends in one;
// the choices are then what came before.
func read(status int, stream bool, body []byte) (*answers, error) {
	type object struct {
		Choices []struct {
			Index   int
			Text    string
			Message struct{ Content string }
			Delta   struct{ Content string }
			Finish  string `json:"finish_reason"`
		}
		Error *struct{ Message string }
	}
	a := &answers{text: map[int]string{}, finish: map[int]string{}}
	take := func(data []byte) (failed bool, err error) {
		var o object
		if err := json.Unmarshal(data, &o); err != nil {
			return false, fmt.Errorf("not JSON: %w: %.200q", err, data)
		}
		for _, c := range o.Choices {
			a.text[c.Index] += c.Text + c.Message.Content + c.Delta.Content
			a.finish[c.Index] += c.Finish
		}
		return o.Error != nil && o.Error.Message != "", nil
	}
	if status != http.StatusOK || !stream {
		failed, err := take(body)
		switch {
		case err != nil && status == http.StatusOK:
			return nil, err
		case err != nil || status != http.StatusOK: // an engine's own words may be of any form
			return nil, errTold
		case failed:
			return nil, fmt.Errorf("status 200 for an error: %.200q", body)
		}
		return a, nil
	}
	told := false
	done, err := testbed.Events(body, func(data []byte) error {
		failed, err := take(data)
		told = told || failed
		return err
	})
	switch {
	case err != nil:
		return nil, err
	case told:
		return a, errTold
	case !done:
		return nil, fmt.Errorf("the stream ends without a word after %d bytes: %.300q", len(body), body[max(0, len(body)-300):])
	}
	return a, nil
}

// slowOnce is a client that takes a few bytes now and then and leaves in the middle, or
// is cut off because it does not read.
func (c *crowd) slowOnce(ctx context.Context, rng *rand.Rand) error {
	prompt := reftext.MakePrompt(rng.Uint64()>>8, 10)
	body := fmt.Sprintf(`{"model":%q,"prompt":%q,"max_tokens":4000,"ignore_eos":true,"stream":true}`, model, prompt)
	conn, err := net.Dial("tcp", c.p.Clients)
	if err != nil {
		return fmt.Errorf("slow client: %w", err)
	}
	defer func() { _ = conn.Close() }()
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetReadBuffer(4 << 10)
	}
	fmt.Fprintf(conn, "POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer %s\r\nContent-Type: "+
		"application/json\r\nContent-Length: %d\r\n\r\n%s",
		callers[1].key(), len(body), body)
	if rng.IntN(2) == 0 {
		pause(ctx, 5*time.Second) // reads nothing at all
	}
	drip := &drip{conn: conn, ctx: ctx, end: time.Now().Add(time.Duration(rng.IntN(6000)) * time.Millisecond)}
	resp, err := http.ReadResponse(bufio.NewReaderSize(drip, 64), nil)
	if err != nil || resp.StatusCode != http.StatusOK {
		return errTold // or left before it answered
	}
	text, _ := io.ReadAll(resp.Body) // it ends where the client leaves or is cut off
	_ = resp.Body.Close()
	key := reftext.Of(prompt).Answer
	var sofar string
	_, _ = testbed.Events(text, func(data []byte) error {
		var o struct{ Choices []struct{ Text string } }
		if json.Unmarshal(data, &o) == nil && len(o.Choices) > 0 { // the last one may be half of one
			sofar += o.Choices[0].Text
		}
		return nil
	})
	if _, err := reftext.Check(key, 0, sofar); err != nil {
		return fmt.Errorf("a slow client's text: %w", err)
	}
	return nil
}

// drip reads a few bytes now and then, until its time is over.
type drip struct {
	conn net.Conn
	ctx  context.Context //nolint:containedctx // it is the reader's whole life
	end  time.Time
}

func (d *drip) Read(p []byte) (int, error) {
	if time.Now().After(d.end) || !pause(d.ctx, 30*time.Millisecond) {
		return 0, io.EOF
	}
	_ = d.conn.SetReadDeadline(d.end.Add(time.Second))
	return d.conn.Read(p[:min(len(p), 64)])
}
