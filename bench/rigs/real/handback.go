package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"time"

	"evenkeel/bench/rigs/real/vllm"
	"evenkeel/bench/rigs/testbed"
)

// The experiment with hand-backs: chats whose prompts the prefill engine has dropped from its cache before each further turn. It either
// computes the prompt anew, or gets the KV of the last turn from the decode engine, which has kept it: by hand, or by evenkeel.
const (
	chats      = 20
	chatTurns  = 6
	firstTurn  = 600  // tokens
	laterTurn  = 100  // tokens that a user adds
	answerLong = 16   // tokens
	roomy      = 3000 // blocks of the decode engine, which keeps the KV of all these answers
)

// handsBack are the settings with which a decode engine keeps the KV of answers.
const handsBack = `,"kv_connector_extra_config":{"bidirectional_kv_xfer":true}`

// A way is how the prompt of a further turn comes to the prefill engine.
type way string

const (
	anew       way = "computes the prompt"
	byHand     way = "gets the hand-back by hand"
	byEvenkeel way = "gets it by evenkeel (hand_back: fetched)"
)

// turned is what the further turns took.
type turned struct {
	turns, right int
	cached       int     // tokens that prefill engines had, or got from the decode engine
	computed     int     // and those that they computed
	bytes        float64 // that they pulled
	ttft         []time.Duration
	kept         float64 // tokens of the decode engine's memory that came into use, for no request
}

// tryHandBacks runs the experiment, without hand-backs and with them, and writes what it found.
func tryHandBacks(ctx context.Context, o options, installed *vllm.Installation, out io.Writer) (err error) {
	o.extra = handsBack
	w, err := newSite(ctx, o, installed, out)
	if err != nil {
		return err
	}
	w.engines["d0"].flags = append(w.engines["d0"].flags, "--num-gpu-blocks-override", fmt.Sprint(roomy))
	good := false
	defer func() { err = errors.Join(err, w.Close(good)) }()
	if err := w.need(ctx, "plain", "p0", "d0"); err != nil {
		return err
	}
	ways := []way{anew, byHand, byEvenkeel}
	found := make([]*turned, len(ways))
	for i, by := range ways {
		if by == byEvenkeel {
			if err := w.evenkeel(ctx, setting{decode: []string{w.engines["d0"].url()}, slots: slots, fetches: true}); err != nil {
				return err
			}
		}
		if found[i], err = w.converse(ctx, by, uint64(20_000+1000*i)); err != nil {
			return fmt.Errorf("%s: %w", by, err)
		}
	}
	fmt.Fprintf(out, "\n%s, %d chats of %d turns by token ids. Of turns 2 to %d, whose prompts the prefill engine had dropped:\n\n", w.version,
		chats, chatTurns, chatTurns)
	fmt.Fprintln(out, "| the prefill engine | tokens computed | tokens cached or pulled | MB pulled | TTFT, median | TTFT, 90th of 100 | "+
		"answers as of the plain engine |")
	fmt.Fprintln(out, "|---|--:|--:|--:|--:|--:|--:|")
	for i, name := range ways {
		t := found[i]
		slices.Sort(t.ttft)
		fmt.Fprintf(out, "| %s | %d | %d | %.1f | %d ms | %d ms | %d of %d |\n", name, t.computed, t.cached, t.bytes/1e6,
			t.ttft[len(t.ttft)/2].Milliseconds(), t.ttft[len(t.ttft)*9/10].Milliseconds(), t.right, t.turns)
	}
	fmt.Fprintf(out, "\nThe decode engine kept %.0f, %.0f and %.0f tokens more at the end of each.\n", found[0].kept, found[1].kept,
		found[2].kept)
	for _, outcome := range []string{"fetched", "failed", "none"} {
		fmt.Fprintf(out, "evenkeel_hand_backs_total{outcome=%q} %.0f\n", outcome,
			w.books()[fmt.Sprintf("evenkeel_hand_backs_total{outcome=%q}", outcome)])
	}
	good = true
	return nil
}

// spoken is one chat so far.
type spoken struct {
	prompt   []int
	handBack json.RawMessage // of the last answer
}

// converse has all chats take their turns, one chat after the other, turn by turn.
func (w *site) converse(ctx context.Context, by way, seed uint64) (*turned, error) {
	all := make([]spoken, chats)
	for i := range all {
		all[i].prompt = ids(firstTurn, seed+uint64(i))
	}
	t := &turned{}
	keptBefore, err := w.keptBy(ctx)
	if err != nil {
		return nil, err
	}
	for turn := range chatTurns {
		if turn > 0 {
			if err := w.pushOut(ctx, seed+100*uint64(turn)); err != nil {
				return nil, err
			}
		}
		for i := range all {
			if err := w.turn(ctx, &all[i], by, turn > 0, t); err != nil {
				return nil, fmt.Errorf("chat %d, turn %d: %w", i, turn+1, err)
			}
			all[i].prompt = append(all[i].prompt, ids(laterTurn, seed+500+uint64(chats*turn+i))...)
		}
	}
	used, err := w.keptBy(ctx)
	t.kept = used - keptBefore
	return t, err
}

// keptBy is how many tokens of its memory the decode engine has in use.
func (w *site) keptBy(ctx context.Context) (tokens float64, err error) {
	series, err := w.engines["d0"].series(ctx)
	return gauge(series, kvUsage) * roomy * blockSize, err
}

// pushOut fills the prefill engine's cache with other prompts.
func (w *site) pushOut(ctx context.Context, seed uint64) error {
	for i := range blocks*blockSize/1900 + 2 {
		if a := ask(ctx, http.MethodPost, w.engines["p0"].url()+completions,
			greedy.With(body{"prompt": ids(1900, seed+uint64(i)), "max_tokens": 1})); a.Status != http.StatusOK {
			return fmt.Errorf("the prefill engine: %v", a)
		}
	}
	return nil
}

// handed is an answer with what it says of its KV.
type handed struct {
	Choices []struct {
		IDs []int `json:"token_ids"`
	} `json:"choices"`
	Usage struct {
		Prompt  int `json:"prompt_tokens"`
		Details struct {
			Cached int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	} `json:"usage"`
	KV json.RawMessage `json:"kv_transfer_params"`
}

func handOf(a answer) (h handed, err error) {
	if err = json.Unmarshal(a.Body, &h); err != nil || a.Status != http.StatusOK || len(h.Choices) == 0 {
		return h, fmt.Errorf("%v %w", a, err)
	}
	return h, nil
}

// turn is one turn of a chat. It is measured if it is a further one.
func (w *site) turn(ctx context.Context, c *spoken, by way, measured bool, t *turned) error {
	q := greedy.With(body{"prompt": c.prompt, "max_tokens": answerLong, "return_token_ids": true})
	pulled := func() (bytes float64, err error) {
		series, err := w.engines["p0"].series(ctx)
		return gauge(series, "nixl_bytes_transferred_sum"), err
	}
	before, err := pulled()
	if err != nil {
		return err
	}
	began := time.Now()
	url := w.proxy.URL()
	last := handed{} // with the usage of the prefill engine
	if by != byEvenkeel {
		probe := q.With(body{"max_tokens": 1, "kv_transfer_params": body{"do_remote_decode": true, "do_remote_prefill": false}})
		if by == byHand && measured && len(c.handBack) > 0 {
			probe["kv_transfer_params"] = c.handBack
		}
		if last, err = handOf(ask(ctx, http.MethodPost, w.engines["p0"].url()+completions, probe)); err != nil {
			return fmt.Errorf("prefill: %w", err)
		}
		url, q = w.engines["d0"].url(), q.With(body{"kv_transfer_params": last.KV})
	}
	prefilled := time.Since(began)
	// A stream of 0.33 says where its KV is, and before only an answer in one piece.
	d := listen(ctx, http.MethodPost, url+completions, q.With(body{"stream": true, "stream_options": body{"include_usage": true}}), nil)
	tokens, handBack, used, err := streamed(d)
	if err != nil {
		return fmt.Errorf("decode: %w", err)
	}
	if by == byEvenkeel {
		last, prefilled = used, 0
	}
	delete(q, "kv_transfer_params")
	if c.handBack = handBack; len(handBack) == 0 && by == byHand {
		return errors.New("the stream does not say where its KV is; take vLLM 0.33 (-over 0.33.0)")
	}
	plain, err := handOf(ask(ctx, http.MethodPost, w.engines["plain"].url()+completions, q))
	if err != nil {
		return fmt.Errorf("plain: %w", err)
	}
	c.prompt = append(c.prompt, tokens...)
	if !measured {
		return nil
	}
	t.turns++
	if slices.Equal(plain.Choices[0].IDs, tokens) {
		t.right++
	}
	t.ttft = append(t.ttft, prefilled+d.First)
	t.cached += last.Usage.Details.Cached
	t.computed += last.Usage.Prompt - last.Usage.Details.Cached
	after, err := pulled()
	t.bytes += after - before
	return err
}

// streamed is the token ids of a stream, where its KV is, and its last event.
func streamed(a answer) (tokens []int, handBack json.RawMessage, last handed, err error) {
	if a.Status != http.StatusOK || a.Err != nil {
		return nil, nil, last, fmt.Errorf("%v", a)
	}
	_, err = testbed.Events(a.Body, func(data []byte) error {
		var h handed
		if err := json.Unmarshal(data, &h); err != nil {
			return fmt.Errorf("%s: %w", data, err)
		}
		for _, c := range h.Choices {
			tokens = append(tokens, c.IDs...)
		}
		if string(h.KV) != "null" && len(h.KV) > 0 {
			handBack = h.KV
		}
		last = h
		return nil
	})
	return tokens, handBack, last, err
}
