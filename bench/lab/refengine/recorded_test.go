package refengine

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/stretchr/testify/require"

	"evenkeel/bench/rigs/real/recording"
	"evenkeel/engine"
)

// differs are recordings that a reference engine does not answer alike, and why that is right.
var differs = map[string]string{
	"chat-n": splits, "chat-n-stream": splits, "completion-n": splits, "completion-n-stream": splits,
	"completion-list": splits, "completion-list-stream": splits, "completion-list-ids": splits, "completion-list-ids-stream": splits,
	"chat-end-stream": empty, "chat-end-proxied": empty, "completion-end-stream": empty, "completion-stop-id-stream": empty,
	"completion-stop-stream": empty,
	"chat-structured-stream": endsBare, "chat-penalties-stream": endsBare,
	"decode-completion-logprobs": "all tokens came in one event, which has the prompt's ids and the end at once",
	"chat-tools-required-stream": "the model makes three calls",
	"prefill-chat-tools":         "the call is cut by max_tokens, and the markup is another one: a probe's one token is the beginning of a call",
	"error-schema":               "a reference engine reads no schema",
	"error-token-id":             "a reference engine names the prompt in param, for evenkeel reads none",
}

const (
	endsBare = "the answer's last token has no text, which no token of a reference engine lacks"
	splits   = "evenkeel asks an engine for one answer to one prompt, so that a reference engine refuses more"
	empty    = "the answer has no text, and each answer of a reference engine has some"
)

// fieldsDiffer are members of answers that only one of the two has, by their paths in any
// recording.
var fieldsDiffer = map[string]string{
	"call event: choices[].token_ids[]": "a reference engine opens a tool call in an event without a token",
	"end event: choices[].token_ids[]":  "and ends it in one",
}

// world is the reference engines that stand for the recorded ones.
type world map[string]*Engine

func recordedWorld(t *testing.T) world {
	w := world{}
	for name, role := range map[string]Role{"plain": Both, "prefill": Prefill, "decode": Decode} {
		w[name] = start(t, Config{Role: role, Connector: NIXLPull, Version: "0.32.0", Model: Model{Name: "tiny", MaxLen: 2048},
			Answers: Answers{PromptTokensDetails: true},
			Steps:   Steps{C0: 100 * time.Microsecond}, Prompts: Prompts{Base: time.Millisecond}, KV: KV{PrefixCache: 16},
			KVEvents: KVEvents{Address: "127.0.0.1:0", Encoding: "map"}})
	}
	return w
}

// TestReferenceEnginesAnswerLikeRecordedOnes sends the recorded requests to reference engines and
// compares the shape of the answers with what real engines gave: status, heads, members and their
// types, and the order of events.
func TestReferenceEnginesAnswerLikeRecordedOnes(t *testing.T) {
	all, err := recording.All()
	require.NoError(t, err)
	w, c := recordedWorld(t), client(t)
	// of the reference prefill engine, by the name of the decode leg
	handoffs := map[string]json.RawMessage{}
	slices.SortStableFunc(all, func(a, b *recording.Recording) int { return strings.Compare(b.Engine, a.Engine) }) // prefill before decode
	for _, r := range all {
		if r.Ask.Path == "/metrics" || r.End != recording.Whole {
			continue
		}
		t.Run(r.Name, func(t *testing.T) {
			body := r.Ask.Body
			if r.Engine == "decode" && strings.Contains(body, `"do_remote_prefill":true`) {
				body = withHandoff(t, body, handoffs[r.Name])
			}
			got := do(c, r.Ask.Method, w[r.Engine].URLs()[0]+r.Ask.Path, body, "X-Request-Id", r.Ask.ID)
			if r.Engine == "prefill" && got.status == 200 {
				var said struct {
					KV json.RawMessage `json:"kv_transfer_params"`
				}
				_ = json.Unmarshal([]byte(got.body), &said)
				handoffs[strings.Replace(r.Name, "prefill-", "decode-", 1)] = said.KV
			}
			differences := compare(r, got)
			if why := differs[r.Name]; why != "" {
				require.NotEmpty(t, differences, "it answers alike now: %s", why)
				return
			}
			require.Empty(t, differences, "the reference engine answered\n%s\nthe real one\n%s", got.body, r.Body())
		})
	}
}

const unreachable = 9.0 // the port in a recorded hand-off that points to nobody

// withHandoff puts a reference engine's hand-off in the place of the recorded one.
func withHandoff(t *testing.T, body string, kv json.RawMessage) string {
	if kv == nil {
		t.Skip("its hand-off is one that only a real engine makes")
	}
	var members map[string]json.RawMessage
	require.NoError(t, json.Unmarshal([]byte(body), &members))
	var want, have map[string]any
	require.NoError(t, json.Unmarshal(members["kv_transfer_params"], &want))
	require.NoError(t, json.Unmarshal(kv, &have))
	if want["remote_port"] == unreachable {
		kv = []byte(strings.Replace(string(kv), fmt.Sprintf(`"remote_port":%v`, have["remote_port"]), fmt.Sprintf(`"remote_port":%v`, unreachable), 1))
	}
	return strings.Replace(body, string(members["kv_transfer_params"]), string(kv), 1)
}

// compare tells how two answers to one request differ in shape.
func compare(r *recording.Recording, got reply) (differences []string) {
	differ := func(format string, args ...any) { differences = append(differences, fmt.Sprintf(format, args...)) }
	if r.Status != got.status {
		differ("status %d, the real one is %d", got.status, r.Status)
	}
	for _, head := range []string{"Content-Type", "Allow"} {
		if have := got.header.Get(head); have != r.Header(head) {
			differ("%s is %q, the real one is %q", head, have, r.Header(head))
		}
	}
	if have := got.header.Get("Content-Length") != ""; have != (r.Header("Content-Length") != "") { // else it is chunked
		differ("a length in the head: %v, the real one is the opposite", have)
	}
	if r.Streams() {
		return append(differences, compareEvents(eventsOf(string(r.Body())), eventsOf(got.body))...)
	}
	differences = append(differences, compareShapes("", shapeOf(r.Body()), shapeOf([]byte(got.body)))...)
	return append(differences, compareOrders(ordersOf("", r.Body()), ordersOf("", []byte(got.body)))...)
}

// shape is the members of a document: their paths, and the types that stand there.
type shape map[string]string

func shapeOf(doc []byte) shape {
	s := shape{}
	var v any
	if err := json.Unmarshal(doc, &v); err != nil {
		s["(text)"] = fmt.Sprint(len(doc) > 0)
		return s
	}
	s.add("", v)
	return s
}

func (s shape) add(path string, v any) {
	switch v := v.(type) {
	case map[string]any:
		for key, value := range v {
			if strings.HasSuffix(path, "top_logprobs[]") && path != "choices[].logprobs.content[].top_logprobs[]" {
				key = "*" // a token
			}
			s.add(strings.TrimPrefix(path+"."+key, "."), value)
		}
	case []any:
		s.note(path, "list")
		for _, e := range v {
			s.add(path+"[]", e)
		}
	default:
		s.note(path, map[bool]string{true: "null", false: fmt.Sprintf("%T", v)}[v == nil])
	}
}

func (s shape) note(path, kind string) {
	if old := s[path]; old != "" && old != kind {
		kinds := strings.Split(old+"|"+kind, "|")
		slices.Sort(kinds)
		kind = strings.Join(slices.Compact(kinds), "|")
	}
	s[path] = kind
}

func compareShapes(where string, want, have shape) (differences []string) {
	paths := maps.Clone(want)
	maps.Copy(paths, have)
	for _, path := range slices.Sorted(maps.Keys(paths)) {
		if want[path] != have[path] && fieldsDiffer[where+path] == "" {
			differences = append(differences, fmt.Sprintf("%s%s is %q, the real one is %q", where, path, have[path], want[path]))
		}
	}
	return differences
}

// orders tell which member of an object stands before which: its path, the member, the later
// member.
type orders map[[3]string]bool

func ordersOf(path string, doc []byte) orders {
	o := orders{}
	if json.Valid(doc) {
		o.read(json.NewDecoder(bytes.NewReader(doc)), path)
	}
	return o
}

func (o orders) read(from *json.Decoder, path string) {
	begin, _ := from.Token()
	if begin != json.Delim('{') && begin != json.Delim('[') {
		return
	}
	var before []string
	for from.More() {
		if begin == json.Delim('[') {
			o.read(from, path+"[]")
			continue
		}
		key, _ := from.Token()
		name := fmt.Sprint(key)
		for _, earlier := range before {
			o[[3]string{path, earlier, name}] = true
		}
		before = append(before, name)
		o.read(from, strings.TrimPrefix(path+"."+name, "."))
	}
	_, _ = from.Token()
}

// compareOrders tells which members that both have stand the other way round.
func compareOrders(want, have orders) (differences []string) {
	for o := range want {
		if have[[3]string{o[0], o[2], o[1]}] {
			differences = append(differences, fmt.Sprintf("of %s, %s stands before %s, and in the real one behind it", o[0], o[2], o[1]))
		}
	}
	slices.Sort(differences)
	return differences
}

// kindOf names an event by what it brings, and tells whether it has text.
func kindOf(data string) (kind string, text bool) {
	var e struct {
		Error   any `json:"error"`
		Choices []struct {
			Text   *string `json:"text"`
			Finish any     `json:"finish_reason"`
			Delta  struct {
				Role    string  `json:"role"`
				Content *string `json:"content"`
				Calls   []struct {
					ID string `json:"id"`
				} `json:"tool_calls"`
			} `json:"delta"`
		} `json:"choices"`
	}
	_ = json.Unmarshal([]byte(data), &e) // [DONE] is none
	switch {
	case data == "[DONE]":
		return "done", false
	case e.Error != nil:
		return "error", false
	case len(e.Choices) == 0:
		return "usage", false
	}
	c := e.Choices[0]
	text = c.Text != nil && *c.Text != "" || c.Delta.Content != nil && *c.Delta.Content != ""
	switch {
	case c.Finish != nil:
		return "end", text
	case c.Delta.Role != "":
		return "role", text
	case len(c.Delta.Calls) > 0 && c.Delta.Calls[0].ID != "":
		return "call", text
	case len(c.Delta.Calls) > 0:
		return "arguments", text
	case c.Text == nil && c.Delta.Content == nil:
		return "nothing", text
	}
	return "text", text
}

type kindAndShape struct {
	kind string
	text bool
	shape
	orders
}

func eventsOf(body string) (events []kindAndShape) {
	for part := range strings.SplitSeq(strings.TrimSuffix(body, "\n\n"), "\n\n") {
		data := strings.TrimPrefix(part, "data: ")
		kind, text := kindOf(data)
		events = append(events, kindAndShape{
			kind: kind, text: text, shape: shapeOf([]byte(data)), orders: ordersOf(kind+" event", []byte(data)),
		})
	}
	return events
}

// compareEvents compares the order of the kinds of events, and the shapes of each kind.
func compareEvents(want, have []kindAndShape) (differences []string) {
	order := func(events []kindAndShape) (kinds []string) {
		for _, e := range events {
			if e.kind == "end" && e.text { // an engine whose client reads slowly puts the last tokens into the last event
				kinds = append(kinds, "text")
			}
			if e.kind != "nothing" { // a real engine sends it for a token that is no text yet: half of a rune, or the markup of a tool call
				kinds = append(kinds, e.kind)
			}
		}
		return slices.Compact(kinds)
	}
	if a, b := order(want), order(have); !slices.Equal(a, b) {
		differences = append(differences, fmt.Sprintf("events are %v, the real ones are %v", b, a))
	}
	inOrder := func(events []kindAndShape) orders {
		all := orders{}
		for _, e := range events {
			maps.Copy(all, e.orders)
		}
		return all
	}
	differences = append(differences, compareOrders(inOrder(want), inOrder(have))...)
	byKind := func(events []kindAndShape) map[string]shape {
		first := map[string]shape{}
		for i, e := range events {
			kind := e.kind
			if i == 0 && kind == "text" {
				kind = "first text" // with the ids of the prompt
			}
			if first[kind] == nil {
				first[kind] = shape{}
			}
			for path, types := range e.shape {
				for one := range strings.SplitSeq(types, "|") {
					first[kind].note(path, one)
				}
			}
		}
		return first
	}
	a, b := byKind(want), byKind(have)
	for _, kind := range slices.Sorted(maps.Keys(a)) {
		if b[kind] != nil {
			differences = append(differences, compareShapes(kind+" event: ", a[kind], b[kind])...)
		}
	}
	return differences
}

// TestReferenceMetricsAreLikeRecordedOnes: each series of a reference engine is one of a real
// engine's, of the same type and with the same labels, and evenkeel reads as much from both.
func TestReferenceMetricsAreLikeRecordedOnes(t *testing.T) {
	all, err := recording.All()
	require.NoError(t, err)
	w, c := recordedWorld(t), client(t)
	for _, r := range all {
		if !strings.HasSuffix(r.Name, "-metrics-idle") {
			continue
		}
		t.Run(r.Name, func(t *testing.T) {
			page := do(c, "GET", w[r.Engine].URLs()[0]+"/metrics", "")
			require.Equal(t, http.StatusOK, page.status)
			want, have := families(t, r.Body()), families(t, []byte(page.body))
			for name, f := range have {
				require.Contains(t, want, name)
				require.Equal(t, want[name].GetType(), f.GetType(), name)
				require.Subset(t, labels(want[name]), labels(f), name)
			}
			known := func(page []byte) map[string]bool {
				s, err := engine.MetricNames{}.Parse(page)
				require.NoError(t, err)
				memory := s.Memories(nil).Of(0)
				k := map[string]bool{"start": s.StartTime > 0, "block": memory.Block.Tokens > 0, "capacity": memory.Capacity.Tokens > 0}
				_, k["usage"] = s.KVUsage(0)
				_, k["running"] = s.Running(0)
				_, k["waiting"] = s.Waiting(0)
				_, k["generated"] = s.Generated(0)
				_, k["not pulled"] = s.NotPulledTokens(-1)
				return k
			}
			require.Equal(t, known(r.Body()), known([]byte(page.body)))
		})
	}
}

func families(t *testing.T, page []byte) map[string]*dto.MetricFamily {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	f, err := parser.TextToMetricFamilies(bytes.NewReader(page))
	require.NoError(t, err)
	return f
}

func labels(f *dto.MetricFamily) (names []string) {
	for _, m := range f.GetMetric() {
		for _, l := range m.GetLabel() {
			names = append(names, l.GetName())
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}
