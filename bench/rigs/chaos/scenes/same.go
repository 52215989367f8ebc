package scenes

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"regexp"
	"strings"

	"evenkeel/bench/lab/reftext"
	"evenkeel/bench/rigs/testbed"
)

// way is a path from a region to a peer. It is named by the caller whose requests are forwarded on
// it.
type way struct {
	from, to int
	caller   string
}

var ways = []way{{us, eu, "to-eu"}, {us, as, "to-as"}, {eu, as, "to-as"}}

func (w way) String() string { return names[w.from] + " → " + names[w.to] }

// post asks a region as one of the callers.
func (w *site) post(ctx context.Context, to *side, caller, path, body string, stay bool) (testbed.Answer, error) {
	header := []string{"Authorization", "Bearer " + keyOf(caller)}
	if stay {
		header = append(header, "X-Evenkeel-Geo", "local")
	}
	return testbed.Do(ctx, w.HTTP, http.MethodPost, to.URL()+path, []byte(body), header...)
}

// routed says that an answer took that route, and was one.
func routed(a testbed.Answer, route string) bool {
	return a.Status == http.StatusOK && a.Header.Get("X-Evenkeel-Route") == route
}

// forms are requests of every form that an answer can have.
func forms() (list [][2]string) {
	for i, f := range [][2]string{
		{"/v1/chat/completions", `"messages":[{"role":"user","content":%q}],"stream":true`},
		{"/v1/chat/completions", `"messages":[{"role":"user","content":%q}],"stream":true,"stream_options":{"include_usage":true},"seed":7`},
		{"/v1/chat/completions", `"messages":[{"role":"user","content":%q}]`},
		{"/v1/completions", `"prompt":%q,"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}`},
		{"/v1/completions", `"prompt":%q,"stream":true,"logprobs":2`},
		{"/v1/completions", `"prompt":%q`},
	} {
		list = append(list, [2]string{f[0], fmt.Sprintf(`{"model":"ref","max_tokens":12,"ignore_eos":true,`+f[1]+`}`, reftext.MakePrompt(uint64(9000+i), promptTokens+i))})
	}
	return list
}

// own is what two answers to one request differ in wherever they are made: the
// engine's name for it, and the second it was made in.
var own = regexp.MustCompile(`"id":"[^"]*"|"created":\d+`)

func playSame(ctx context.Context, w *site, r *testbed.Report) error {
	const scene = "forwarded answers are the region's own, byte for byte"
	compared, size := 0, 0
	var wrong []string
	for _, way := range ways {
		for _, f := range forms() {
			there, err := w.post(ctx, w.all[way.to], "home", f[0], f[1], true)
			if err != nil {
				return err
			}
			var here testbed.Answer
			for range 20 { // one that the peer is too busy for stays, and says so
				if here, err = w.post(ctx, w.all[way.from], way.caller, f[0], f[1], false); err != nil {
					return err
				}
				if here.Header.Get("X-Evenkeel-Route") == "forwarded" {
					break
				}
			}
			if !routed(there, "local") || !routed(here, "forwarded") || here.Header.Get("Content-Type") != there.Header.Get("Content-Type") {
				wrong = append(wrong, fmt.Sprintf("%v, %s: %d %v there, %d %v forwarded: %.200s", way, f[1], there.Status, there.Header, here.Status,
					here.Header, here.Body))
				continue
			}
			a, b := own.ReplaceAll(there.Body, nil), own.ReplaceAll(here.Body, nil)
			if !bytes.Equal(a, b) {
				wrong = append(wrong, fmt.Sprintf("%v, %s: there\n%s\nforwarded\n%s", way, f[1], there.Body, here.Body))
			}
			compared, size = compared+1, size+len(b)
		}
	}
	r.Add(scene, "%d answers, %d bytes, streamed and not, chat and completions; left out of the comparison: values of `id` and `created`",
		compared, size)
	r.Hold(len(wrong) == 0, scene, "%s", strings.Join(wrong, "\n"))
	return nil
}
