package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	"evenkeel/bench/rigs/asked"
	"evenkeel/bench/rigs/testbed"
)

const generate = "/generate"

// ids are tokens of the model that no two seeds have in common by chance.
func ids(n int, seed uint64) (list []int) {
	for range n {
		seed = seed*6364136223846793005 + 1442695040888963407
		list = append(list, int(3+seed>>33%1000))
	}
	return list
}

// asks is a request with a limit of 12 tokens.
func asks(more, params body) body {
	return body{"input_ids": ids(40, 1), "sampling_params": body{"temperature": 0, "max_new_tokens": 12}.With(params)}.With(more)
}

var none = body{"input_ids": nil}

// refused says for whom evenkeel refuses what SGLang answers.
type refused string

const (
	always refused = "always"
	byPair refused = "by a pair" // of engines, which evenkeel has decode what others prefill
)

// shapes are requests whose answers must be what the server itself says, whole and in a stream,
// alone and by a pair.
var shapes = []struct {
	name string
	body any
	not  refused // none: it is answered
}{
	{"input_ids", asks(nil, nil), ""},
	{"text", asks(none.With(body{"text": "The capital of France is"}), nil), ""},
	{"text beside input_ids", asks(body{"text": "Hello there"}, nil), always},
	{"a list of input_ids", asks(body{"input_ids": [][]int{ids(30, 2), ids(20, 3), ids(10, 4)}}, nil), ""},
	{"a list of one input_ids", asks(body{"input_ids": [][]int{ids(30, 2)}}, nil), ""},
	{"a list of texts", asks(none.With(body{"text": []string{"One", "Two and", "Three of them"}}), nil), ""},
	{"no sampling_params", body{"input_ids": ids(40, 5)}, ""},
	{"sampling_params null", body{"input_ids": ids(40, 5), "sampling_params": nil}, ""},
	{"a list of sampling_params", asks(body{"input_ids": [][]int{ids(30, 2), ids(20, 3)}, "sampling_params": []body{{"max_new_tokens": 3}, {"max_new_tokens": 5}}}, nil), always},
	{"n 3", asks(nil, body{"n": 3}), ""},
	{"n 2 of a list", asks(body{"input_ids": [][]int{ids(30, 2), ids(20, 3)}}, body{"n": 2}), ""},
	{"max_new_tokens 1", asks(nil, body{"max_new_tokens": 1}), ""},
	{"max_new_tokens 0", asks(nil, body{"max_new_tokens": 0}), always},
	{"ignore_eos, min_new_tokens", asks(nil, body{"ignore_eos": true, "min_new_tokens": 3, "max_new_tokens": 200}), ""},
	{"to the end of the text", asks(nil, body{"max_new_tokens": 900}), ""},
	{"stop", asks(nil, body{"stop": []string{"e", "a"}, "max_new_tokens": 200}), ""},
	{"stop, no_stop_trim", asks(nil, body{"stop": "e", "no_stop_trim": true, "max_new_tokens": 200}), ""},
	{"stop_token_ids", asks(nil, body{"stop_token_ids": ids(120, 6), "max_new_tokens": 200}), ""},
	{"skip_special_tokens", asks(nil, body{"skip_special_tokens": false, "max_new_tokens": 900}), ""},
	{"return_logprob", asks(body{"return_logprob": true}, nil), ""},
	{"return_logprob, top_logprobs_num", asks(body{"return_logprob": true, "top_logprobs_num": 3}, nil), ""},
	{"return_logprob, token_ids_logprob", asks(body{"return_logprob": true, "token_ids_logprob": []int{5, 7}}, nil), ""},
	{"return_logprob, logprob_start_len 0", asks(body{"return_logprob": true, "logprob_start_len": 0, "top_logprobs_num": 2}, nil), byPair},
	{"return_logprob, return_text_in_logprobs", asks(body{"return_logprob": true, "return_text_in_logprobs": true}, nil), ""},
	{"return_logprob of a list, one of them", asks(body{"input_ids": [][]int{ids(30, 2), ids(20, 3)}, "return_logprob": []bool{true, false}, "top_logprobs_num": []int{2, 0}}, nil), always},
	{"return_logprob of a list", asks(body{"input_ids": [][]int{ids(30, 2), ids(20, 3)}, "return_logprob": true, "top_logprobs_num": 2}, nil), ""},
	{"return_prompt_token_ids", asks(none.With(body{"text": "The capital", "return_prompt_token_ids": true}), nil), ""},
	{"rid", asks(body{"rid": "mine"}, nil), ""},
	{"rids of a list", asks(body{"input_ids": [][]int{ids(30, 2), ids(20, 3)}, "rid": []string{"one", "two"}}, nil), ""},
	{"rid of a list", asks(body{"input_ids": [][]int{ids(30, 2), ids(20, 3)}, "rid": "mine"}, nil), ""},
	{"stream_interval", asks(nil, body{"stream_interval": 5}), ""},
	{"model", asks(body{"model": base}, nil), ""},

	{"no prompt", body{"sampling_params": body{"max_new_tokens": 4}}, ""},
	{"empty input_ids", asks(body{"input_ids": []int{}}, nil), ""},
	{"an empty list of texts", asks(none.With(body{"text": []string{}}), nil), always},
	{"an empty text", asks(none.With(body{"text": ""}), nil), ""},
	{"input_ids of text", asks(body{"input_ids": "text"}, nil), ""},
	{"a negative token", asks(body{"input_ids": []int{5, -1}}, nil), always},
	{"a token that the model lacks", asks(body{"input_ids": []int{5, 99_999_999}}, nil), ""},
	{"an unknown field", asks(body{"flavor": 1}, nil), ""},
	{"an unknown sampling parameter", asks(nil, body{"max_tokens": 5}), ""},
	{"temperature -1", asks(nil, body{"temperature": -1}), ""},
	{"top_p 2", asks(nil, body{"top_p": 2}), ""},
	{"max_new_tokens -1", asks(nil, body{"max_new_tokens": -1}), ""},
	{"max_new_tokens of text", asks(nil, body{"max_new_tokens": "many"}), ""},
	{"min_new_tokens above max_new_tokens", asks(nil, body{"min_new_tokens": 20}), ""},
	{"n 0", asks(nil, body{"n": 0}), always},
	{"too long a prompt", asks(body{"input_ids": ids(3000, 8)}, nil), ""},
	{"too many new tokens", asks(nil, body{"max_new_tokens": 5000}), ""},
	{"logprob_start_len behind the prompt", asks(body{"return_logprob": true, "logprob_start_len": 100}, nil), ""},
	{"token_ids_logprob that the model lacks", asks(body{"return_logprob": true, "token_ids_logprob": []int{99_999_999}}, nil), ""},
	{"rids that are equal", asks(body{"input_ids": [][]int{ids(30, 2), ids(20, 3)}, "rid": []string{"one", "one"}}, nil), ""},
	{"return_hidden_states", asks(body{"return_hidden_states": true}, nil), ""},
	{"no JSON", []byte(`{"input_ids": [1,2`), ""},
	{"a list for a body", []byte(`[1]`), ""},
}

// cell is one comparison.
type cell struct {
	same bool
	said string
}

// line is a line of the table: alone, alone in a stream, by a pair, by a pair in a stream.
type line struct {
	name  string
	cells []cell
}

func (w *site) shape(ctx context.Context, name string, of any, not refused) line {
	l := line{name: name}
	for _, proxy := range []*testbed.Proxy{w.alone, w.pair} {
		refuses := not == always || not == byPair && proxy == w.pair
		for _, stream := range []bool{false, true} {
			asked, named := of, false
			if b, ok := of.(body); ok {
				_, named = b["rid"]
				asked = b.With(body{"stream": stream})
			}
			same, said := judge(ask(ctx, "POST", w.url(plain)+generate, asked), ask(ctx, "POST", proxy.URL()+generate, asked), named, refuses)
			l.cells = append(l.cells, cell{same, said})
		}
	}
	return l
}

// scene is what two answers cannot show.
type scene struct {
	name string
	run  func(ctx context.Context, w *site) (said string, err error)
}

var scenes = []scene{
	{"abort_request by rid, in a stream", func(ctx context.Context, w *site) (string, error) {
		return w.aborts(ctx, body{"rid": "to-end"}, asks(body{"rid": "to-end", "stream": true}, long))
	}},
	{"abort_request by rid, one piece", func(ctx context.Context, w *site) (string, error) {
		return w.aborts(ctx, body{"rid": "to-end"}, asks(body{"rid": "to-end"}, long))
	}},
	{"abort_all, in a stream", func(ctx context.Context, w *site) (string, error) {
		return w.aborts(ctx, body{"abort_all": true}, asks(body{"stream": true}, long))
	}},
	{"abort_all, a list in one piece", func(ctx context.Context, w *site) (string, error) {
		return w.aborts(ctx, body{"abort_all": true}, asks(body{"input_ids": [][]int{ids(30, 2), ids(20, 3)}}, long))
	}},
	{"abort_request of nothing", func(ctx context.Context, w *site) (string, error) {
		for _, b := range []any{body{"rid": "nobody"}, body{}, body{"rid": 5}, []byte("{")} {
			a, b2 := ask(ctx, "POST", w.url(plain)+"/abort_request", b), ask(ctx, "POST", w.alone.URL()+"/abort_request", b)
			if a.Status != b2.Status {
				return "", fmt.Errorf("%v: %v, not %v", b, b2, a)
			}
		}
		return "four bodies have the same status", nil
	}},
	{"a LoRA adapter, and a base model with a colon in its name", adapts},
	{"kill -9 of a server under streams and answers in one piece", dies},
	{"a rollout by SGLang's documented client: 64 prompts with 8 samples", rollout},
}

var long = body{"max_new_tokens": 1500, "ignore_eos": true}

// aborts asks a server and both evenkeels for a long answer and ends it. All must end in the same
// way.
func (w *site) aborts(ctx context.Context, end, of body) (string, error) {
	var list []string
	for _, url := range []string{w.url(plain), w.alone.URL(), w.pair.URL()} {
		var ended answer
		var wait sync.WaitGroup
		wait.Go(func() {
			if testbed.Pause(ctx, 3*time.Second) == nil {
				ended = ask(ctx, "POST", url+"/abort_request", end)
			}
		})
		got := ask(ctx, "POST", url+generate, of)
		wait.Wait()
		doc, err := got.value()
		if err != nil || ended.Status != 200 {
			return "", fmt.Errorf("the answer: %v (%w); the abort: %v", got, err, ended)
		}
		var reasons []string
		for path, v := range asked.Leaves(doc) {
			if strings.Contains(path, "finish_reason.") && !strings.HasSuffix(path, ".length") {
				reasons = append(reasons, path+"="+asked.Show(v))
			}
		}
		slices.Sort(reasons)
		list = append(list, fmt.Sprintf("status %d, %v, [DONE] %d", got.Status, reasons, bytes.Count(got.Body, []byte("data: [DONE]"))))
	}
	if list[0] != list[1] || list[0] != list[2] {
		return "", fmt.Errorf("directly: %s; alone: %s; pair: %s", list[0], list[1], list[2])
	}
	return list[0], nil
}

// dies kills one of two servers in the midst of answers. All must be whole in spite of it, but a
// stream ends with an error if its text lacked a part of a character.
func dies(ctx context.Context, w *site) (string, error) {
	const n = 12
	var want, got [n]answer
	var begun, all sync.WaitGroup
	for i := range n {
		b := asks(body{"input_ids": ids(40+i, uint64(100+i)), "stream": i%2 == 0, "return_logprob": i%3 == 0},
			body{"max_new_tokens": 300, "ignore_eos": true})
		begun.Add(1)
		all.Go(func() {
			want[i] = ask(ctx, "POST", w.url(plain)+generate, b)
			var once sync.Once
			if i%2 != 0 {
				once.Do(begun.Done)
			}
			got[i] = listen(ctx, "POST", w.alone.URL()+generate, b, func([]byte) { once.Do(begun.Done) })
			once.Do(begun.Done)
		})
	}
	begun.Wait()
	if err := testbed.Pause(ctx, time.Second); err != nil {
		return "", err
	}
	w.kill(second)
	all.Wait()
	lost := w.alone.Metric("evenkeel_decode_losses_total")
	var wrong []string
	broken := 0
	for i := range n {
		same, said := judge(want[i], got[i], false, false)
		if i%2 == 0 && breaks(want[i], got[i]) {
			broken++
		} else if !same {
			wrong = append(wrong, fmt.Sprintf("%d: %s", i, said))
		}
	}
	if err := w.again(ctx, second); err != nil {
		return "", err
	}
	if len(wrong) > 0 || lost == 0 || broken == n/2 {
		return "", fmt.Errorf("%d of %d differ, %g were lost, %d streams ended with an error: %s", len(wrong), n, lost, broken,
			strings.Join(wrong[:min(2, len(wrong))], "; "))
	}
	return fmt.Sprintf("%g were lost; %d of %d answers are what the server says by itself, %d streams have its beginning and end with an "+
		"error", lost, n-broken, n, broken), nil
}

// breaks says whether a stream is the beginning of another one, with an error at its end.
func breaks(whole, part answer) bool {
	all, err := whole.value()
	if err != nil {
		return false
	}
	events, _ := all["body"].(map[string]any)
	last, _ := events["<nil>"].(map[string]any)
	failed := false
	_, err = testbed.Events(part.Body, func(data []byte) error {
		v, err := asked.Parse(data)
		event, _ := v.(map[string]any)
		if _, failed = event["error"]; !failed && !begins(last["output_ids"], event["output_ids"]) {
			err = errors.Join(err, errors.New("it is another answer"))
		}
		return err
	})
	return failed && err == nil
}

// rollout has a Python client ask as SGLang's documentation shows it (docs/basic_usage/native_api).
func rollout(ctx context.Context, w *site) (string, error) {
	var out [3]string
	for i, url := range []string{w.url(plain), w.alone.URL(), w.pair.URL()} {
		cmd := exec.CommandContext(ctx, w.env.Bin("python"), w.env.Dir+"/rollout.py", url)
		said, err := cmd.Output()
		if err != nil {
			return "", fmt.Errorf("%s: %w", url, err)
		}
		out[i] = string(said)
	}
	if out[0] != out[1] || out[0] != out[2] {
		return "", fmt.Errorf("directly: %.200s; alone: %.200s; pair: %.200s", out[0], out[1], out[2])
	}
	var sum struct{ Answers, Tokens int }
	err := json.Unmarshal([]byte(out[0]), &sum)
	return fmt.Sprintf("%d answers with %d tokens, the same directly, alone and by a pair", sum.Answers, sum.Tokens), err
}
