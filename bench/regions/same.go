package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"

	"evenkeel/bench/process"
	"evenkeel/bench/reftext"
)

// way is one from a region to a peer: the caller whose requests take it.
type way struct {
	from, to int
	caller   string
}

var ways = []way{{us, eu, "to-eu"}, {us, as, "to-as"}, {eu, as, "to-as"}}

func (w way) String() string { return names[w.from] + " → " + names[w.to] }

// answer is what a client got.
type answer struct {
	status             int
	route, contentType string
	body               []byte
}

func (w *world) post(ctx context.Context, to *region, caller, path, body string, stay bool) (a answer, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, to.url()+path, strings.NewReader(body))
	if err != nil {
		return a, err
	}
	req.Header.Set("Authorization", "Bearer "+keyOf(caller))
	req.Header.Set("Content-Type", "application/json")
	if stay {
		req.Header.Set("X-Evenkeel-Geo", "local")
	}
	resp, err := w.http.Do(req)
	if err != nil {
		return a, err
	}
	defer func() { _ = resp.Body.Close() }()
	a = answer{status: resp.StatusCode, route: resp.Header.Get("X-Evenkeel-Route"), contentType: resp.Header.Get("Content-Type")}
	a.body, err = io.ReadAll(resp.Body)
	return a, err
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

func playSame(ctx context.Context, w *world, r *process.Report) error {
	const scene = "forwarded answers are the region's own, byte for byte"
	compared, size := 0, 0
	var wrong []string
	for _, way := range ways {
		for _, f := range forms() {
			there, err := w.post(ctx, w.regions[way.to], "home", f[0], f[1], true)
			if err != nil {
				return err
			}
			var here answer
			for range 20 { // one that the peer is too busy for stays, and says so
				if here, err = w.post(ctx, w.regions[way.from], way.caller, f[0], f[1], false); err != nil {
					return err
				}
				if here.route == "forwarded" {
					break
				}
			}
			if there.status != http.StatusOK || there.route != "local" || here.status != http.StatusOK || here.route != "forwarded" || here.contentType != there.contentType {
				wrong = append(wrong, fmt.Sprintf("%v, %s: %d %s %s there, %d %s %s forwarded: %.200s", way, f[1], there.status, there.route, there.contentType, here.status, here.route, here.contentType, here.body))
				continue
			}
			a, b := own.ReplaceAll(there.body, nil), own.ReplaceAll(here.body, nil)
			if !bytes.Equal(a, b) {
				wrong = append(wrong, fmt.Sprintf("%v, %s: there\n%s\nforwarded\n%s", way, f[1], there.body, here.body))
			}
			compared, size = compared+1, size+len(b)
		}
	}
	r.Add(scene, "%d answers, %d bytes, streamed and not, chat and completions; left out of the comparison: values of `id` and `created`", compared, size)
	r.Hold(len(wrong) == 0, scene, "%s", strings.Join(wrong, "\n"))
	return nil
}
