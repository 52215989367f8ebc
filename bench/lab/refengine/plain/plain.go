// Package plain answers the requests that make no completion, in the shapes of vLLM: token
// counts, embeddings, scores, classes, transcriptions. What it answers follows from the input
// alone, so that an answer to another request is seen.
package plain

import (
	"bytes"
	"cmp"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"mime"
	"mime/multipart"
	"net/http"
	"slices"

	"evenkeel/bench/lab/reftext"
)

// Task is what an engine's model is for, as in vLLM.
type Task string

// The tasks.
const (
	Generate      Task = "" // completions
	Pooling       Task = "pooling"
	Transcription Task = "transcription"
)

// Tasks are those that there are.
var Tasks = []Task{Generate, Pooling, Transcription}

// A Request is one that the engine got.
type Request struct {
	Model  string   // of the engine
	Names  []string // more names that a request may ask for
	Header http.Header
	Body   []byte
}

// An Answer is what the engine says.
type Answer struct {
	Status int
	Type   string
	Body   []byte
	Events []string // of a stream, in place of Body
	Header []string // pairs
	Tokens int      // that it computed
}

// Has says whether an engine for a task has a path, and with which handler.
func Has(t Task, path string) (serve func(Request) Answer, ok bool) {
	serve, ok = paths[t][path]
	return serve, ok
}

var paths = map[Task]map[string]func(Request) Answer{
	Generate: {"/detokenize": of(detokenize)},
	Pooling: {
		"/detokenize": of(detokenize), "/v1/embeddings": of(embeddings), "/v1/rerank": of(rerank), "/v2/rerank": of(rerank), "/rerank": of(rerank), "/v1/score": of(score), "/score": of(score),
		"/classify": of(classify), "/pooling": of(pool),
	},
	Transcription: {"/detokenize": of(detokenize), "/v1/audio/transcriptions": transcribe, "/v1/audio/translations": transcribe},
}

// Vector is the embedding of a text.
func Vector(text string) []float32 {
	v := make([]float32, 4)
	h := reftext.Of(text).Answer
	for i := range v {
		h = reftext.Mix(h + 1)
		v[i] = float32(h%2000)/1000 - 1
	}
	return v
}

func answer(v any, tokens int) Answer {
	body, err := json.Marshal(v)
	if err != nil {
		return refuse(http.StatusInternalServerError, err.Error())
	}
	return Answer{Status: http.StatusOK, Type: "application/json", Body: body, Tokens: tokens}
}

func refuse(status int, message string) Answer {
	body, _ := json.Marshal(map[string]any{"error": map[string]any{"message": message, "type": "BadRequestError", "param": nil,
		"code": status}})
	return Answer{Status: status, Type: "application/json", Body: body}
}

// of reads a request for the engine's model, and has it answered.
func of[T any](serve func(model string, ask T) Answer) func(Request) Answer {
	return func(r Request) Answer {
		var ask T
		var named struct{ Model string }
		if err := cmp.Or(json.Unmarshal(r.Body, &named), json.Unmarshal(r.Body, &ask)); err != nil {
			return refuse(http.StatusBadRequest, err.Error())
		}
		if !r.lists(named.Model) {
			return unknown(named.Model)
		}
		return serve(r.Model, ask)
	}
}

// lists says whether the request may ask for a model.
func (r *Request) lists(model string) bool {
	return model == "" || model == r.Model || slices.Contains(r.Names, model)
}

func unknown(model string) Answer {
	return refuse(http.StatusNotFound, fmt.Sprintf("The model `%s` does not exist.", model))
}

// texts reads one text or several.
func texts(raw json.RawMessage) (list []string) {
	var one string
	if json.Unmarshal(raw, &one) == nil {
		return []string{one}
	}
	_ = json.Unmarshal(raw, &list) // another shape is no text
	return list
}

func usage(all ...string) (map[string]int, int) {
	n := 0
	for _, text := range all {
		n += reftext.Of(text).Tokens()
	}
	return map[string]int{"prompt_tokens": n, "total_tokens": n, "completion_tokens": 0}, n
}

// listed answers for each text, in order.
func listed(model, kind string, all []string, used map[string]int, n int, item func(text string) map[string]any) Answer {
	data := make([]any, len(all))
	for i, text := range all {
		one := item(text)
		one["index"] = i
		data[i] = one
	}
	return answer(map[string]any{"id": kind + "-reference", "object": "list", "created": 1, "model": model, "data": data, "usage": used}, n)
}

func detokenize(_ string, ask struct{ Tokens []int32 }) Answer {
	var text []byte
	for _, id := range ask.Tokens {
		text = reftext.AppendToken(text, id)
	}
	return answer(map[string]string{"prompt": string(text)}, 0)
}

// inputs are the texts of most requests.
type inputs struct {
	Input  json.RawMessage
	Format string `json:"encoding_format"`
}

func embeddings(model string, ask inputs) Answer {
	all := texts(ask.Input)
	if len(all) == 0 {
		return refuse(http.StatusBadRequest, "input: a text or a list of texts is required")
	}
	used, n := usage(all...)
	if ask.Format == "bytes" {
		return binaryAnswer(model, all, used, n)
	}
	return listed(model, "embd", all, used, n, func(text string) map[string]any {
		var vector any = Vector(text)
		if ask.Format == "base64" {
			vector = base64.StdEncoding.EncodeToString(packed(text))
		}
		return map[string]any{"object": "embedding", "embedding": vector}
	})
}

// packed is the embedding of a text as bytes.
func packed(text string) (b []byte) {
	for _, x := range Vector(text) {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(x))
	}
	return b
}

// binaryAnswer has the vectors as bytes, and says in a header what they are.
func binaryAnswer(model string, all []string, used map[string]int, n int) Answer {
	var body []byte
	for _, text := range all {
		body = append(body, packed(text)...)
	}
	about, _ := json.Marshal(map[string]any{"model": model, "data": len(all), "usage": used})
	return Answer{Status: http.StatusOK, Type: "application/octet-stream", Body: body, Header: []string{"metadata", string(about)}, Tokens: n}
}

// Alike is the score of two texts.
func Alike(a, b string) float64 { return float64(reftext.Of(a+"\x00"+b).Answer%1000) / 1000 }

func score(model string, ask struct {
	One json.RawMessage `json:"text_1"`
	Two json.RawMessage `json:"text_2"`
},
) Answer {
	one, two := texts(ask.One), texts(ask.Two)
	if len(one) != 1 || len(two) == 0 {
		return refuse(http.StatusBadRequest, "text_1 and text_2 are required")
	}
	used, n := usage(append(two, one...)...)
	return listed(model, "score", two, used, n, func(text string) map[string]any {
		return map[string]any{"object": "score", "score": Alike(one[0], text)}
	})
}

func rerank(model string, ask struct {
	Query     string
	Documents []string
},
) Answer {
	type result struct {
		Index    int               `json:"index"`
		Document map[string]string `json:"document"`
		Score    float64           `json:"relevance_score"`
	}
	results := make([]result, len(ask.Documents))
	for i, text := range ask.Documents {
		results[i] = result{i, map[string]string{"text": text}, Alike(ask.Query, text)}
	}
	slices.SortFunc(results, func(a, b result) int { return int(math.Copysign(1, b.Score-a.Score)) })
	used, n := usage(append(ask.Documents, ask.Query)...)
	return answer(map[string]any{"id": "rerank-reference", "model": model, "usage": used, "results": results}, n)
}

func classify(model string, ask inputs) Answer {
	all := texts(ask.Input)
	used, n := usage(all...)
	return listed(model, "classify", all, used, n, func(text string) map[string]any {
		p := Alike(text, "yes")
		return map[string]any{"label": "yes", "probs": []float64{p, 1 - p}, "num_classes": 2}
	})
}

func pool(model string, ask inputs) Answer {
	all := texts(ask.Input)
	used, n := usage(all...)
	return listed(model, "pool", all, used, n,
		func(text string) map[string]any { return map[string]any{"object": "pooling", "data": Vector(text)} })
}

// Heard is the transcription of a file.
func Heard(file []byte) string { return reftext.Text(reftext.Of(string(file)).Answer, 6) }

func transcribe(r Request) Answer {
	_, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil {
		return refuse(http.StatusBadRequest, err.Error())
	}
	fields := map[string][]byte{}
	parts := multipart.NewReader(bytes.NewReader(r.Body), params["boundary"])
	for {
		part, err := parts.NextPart()
		if err == io.EOF { //nolint:errorlint // as the package compares
			break
		}
		if err != nil {
			return refuse(http.StatusBadRequest, err.Error())
		}
		if fields[part.FormName()], err = io.ReadAll(part); err != nil {
			return refuse(http.StatusBadRequest, err.Error())
		}
	}
	if model := string(fields["model"]); !r.lists(model) {
		return unknown(model)
	}
	file, ok := fields["file"]
	if !ok {
		return refuse(http.StatusBadRequest, "file: field required")
	}
	key := reftext.Of(string(file)).Answer
	if string(fields["stream"]) != "true" {
		return answer(map[string]any{"text": Heard(file), "usage": map[string]any{"type": "duration", "seconds": 1}}, 0)
	}
	a := Answer{Status: http.StatusOK, Type: "text/event-stream; charset=utf-8"}
	for i := range 6 {
		text, _ := json.Marshal(string(reftext.AppendToken(nil, reftext.TokenID(key, i))))
		finish := "null"
		if i == 5 {
			finish = `"stop"`
		}
		a.Events = append(a.Events, fmt.Sprintf(`{"id":"trsc-reference","object":"transcription.chunk","created":1,"model":%q,"choices":[{"delta":{"content":%s},"finish_reason":%s}]}`, r.Model, text, finish))
	}
	return a
}
