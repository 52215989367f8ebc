package main

import (
	"context"
	"embed"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

//go:embed client
var scripts embed.FS

// embedder is the name of the model by which the engine that embeds serves it.
const embedder = "tiny-embed"

// endpoints are rows of what engines serve besides chats and completions. An engine of the
// same model of two layers embeds; models that classify or hear are not there.
var endpoints = []row{
	usually("responses, by the Python client", of("plain", "responses.py")),
	usually("responses, by the Node client", of("plain", "responses.mjs")),
	usually("messages, by Anthropic's Python client", of("plain", "messages.py")),
	usually("tokens are counted, and become text again", func(ctx context.Context, w *site) (outcome, error) {
		return sameOf(ctx, w, "plain", map[string]body{
			"/tokenize":   {"model": model, "messages": talk},
			"/detokenize": {"model": model, "tokens": ids(20, 7)},
		}), nil
	}),
}

var embeddings = []row{
	scene("embeddings, pooling, scores and an order, of a model without a prefill engine", withEmbedder, besideEmbedder(embedded)),
	scene("embeddings, by the Python client", withEmbedder, besideEmbedder(of(embedding, "embeddings.py"))),
	scene("embeddings, by the Node client", withEmbedder, besideEmbedder(of(embedding, "embeddings.mjs"))),
}

// embedding is the engine that embeds.
const embedding = "embed"

var withEmbedder = append([]string{embedding}, everyone...)

// of runs a script of the folder client against an engine and against evenkeel.
func of(engine, script string) func(context.Context, *site) (outcome, error) {
	return func(ctx context.Context, w *site) (outcome, error) {
		text, err := scripts.ReadFile("client/" + script)
		if err != nil {
			return outcome{}, err
		}
		name, kind, _ := strings.Cut(script, ".")
		dir, with := w.Dir, filepath.Join(w.cache, "venv/bin/python")
		if kind == "mjs" {
			dir, with = filepath.Join(w.cache, "node"), "node"
			if !exists(filepath.Join(dir, "node_modules/openai/package.json")) {
				return failed("the Node client is not installed; the row of its README installs it"), nil
			}
		}
		file := filepath.Join(dir, script)
		if err := os.WriteFile(file, text, 0o600); err != nil {
			return outcome{}, err
		}
		return runClients(ctx, w, engine, []program{{name, []string{with, file}, dir}})
	}
}

// besideEmbedder runs with an evenkeel that has the engine that embeds, too.
func besideEmbedder(run func(context.Context, *site) (outcome, error)) func(context.Context, *site) (outcome, error) {
	return func(ctx context.Context, w *site) (outcome, error) {
		s := w.usual()
		s.decode = append(s.decode, w.engines[embedding].url())
		if err := w.evenkeel(ctx, s); err != nil {
			return outcome{}, err
		}
		return run(ctx, w)
	}
}

func embedded(ctx context.Context, w *site) (outcome, error) {
	return sameOf(ctx, w, embedding, map[string]body{
		"/v1/embeddings": {"model": embedder, "input": []string{"hello there", "what is a proxy?"}},
		"/pooling":       {"model": embedder, "input": "hello there"},
		"/v1/score":      {"model": embedder, "text_1": "hello", "text_2": []string{"hello there", "good bye"}},
		"/v1/rerank":     {"model": embedder, "query": "hello", "documents": []string{"hello there", "good bye"}},
	}), nil
}

// sameOf asks an engine twice and evenkeel once, at each path.
func sameOf(ctx context.Context, w *site, engine string, paths map[string]body) outcome {
	all := outcome{verdict: pass}
	var seen []string
	for path, b := range paths {
		var docs [3]map[string]any
		for i, url := range []string{w.engines[engine].url(), w.engines[engine].url(), w.proxy.URL()} {
			a := ask(ctx, "POST", url+path, b)
			var err error
			if docs[i], err = documentOf(a); err != nil {
				return failed("%s: no document: %v: %v", path, err, a)
			}
		}
		one := judge(docs[0], docs[1], docs[2])
		if fmt.Sprint(docs[0]["status"]) != "200" {
			one = failed("the engine itself answers %v", docs[0])
		}
		if one.verdict != pass && all.verdict != fail {
			all.verdict = one.verdict
		}
		seen = append(seen, path+": "+one.seen)
	}
	all.seen = strings.Join(seen, "; ")
	return all
}
