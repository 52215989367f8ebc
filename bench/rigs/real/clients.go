package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"evenkeel/bench/rigs/pyenv"
)

//go:embed client/client.mjs
var nodeScript []byte

var clients = []row{
	usually("the Python client's own examples", pythonExamples),
	usually("the Node client's README and its forms", nodeExamples),
}

// examples of the Python client that ask for chat completions and need no service
// of somebody else.
var examples = []string{"demo", "streaming", "async_demo", "module_client", "parsing", "parsing_stream", "parsing_tools",
	"parsing_tools_stream"}

// theirModel is what stands in the examples where every user writes a model's
// name. A model of random weights seldom ends an answer, so ours also limits it.
var theirModel = regexp.MustCompile(`(model\s*([=:])\s*)(["'])gpt-[\w.-]+["']`)

const ourModel = "${1}${3}" + model + "${3}, max_tokens${2} 64"

func pythonExamples(ctx context.Context, w *site) (outcome, error) {
	dir := filepath.Join(w.Dir, "python-examples")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return outcome{}, err
	}
	var programs []program
	for _, name := range examples {
		text, err := os.ReadFile(filepath.Join(w.cache, "examples", name+".py"))
		if err != nil {
			return outcome{}, err
		}
		script := theirModel.ReplaceAllString(string(text), ourModel)
		script = strings.Replace(script, `openai.base_url = "https://..."`, "import os; openai.base_url = os.environ['OPENAI_BASE_URL'] + '/'", 1)
		file := filepath.Join(dir, name+".py")
		if err := os.WriteFile(file, []byte(script), 0o600); err != nil {
			return outcome{}, err
		}
		programs = append(programs, program{name, []string{filepath.Join(w.cache, "venv/bin/python"), file}, dir})
	}
	return runClients(ctx, w, "plain", programs)
}

// block is a piece of code in the README.
var block = regexp.MustCompile("(?s)```(?:ts|js)\n(.*?)```")

func nodeExamples(ctx context.Context, w *site) (outcome, error) {
	dir := filepath.Join(w.cache, "node")
	if !exists(filepath.Join(dir, "node_modules/openai/package.json")) {
		for _, name := range []string{"node", "npm"} {
			if _, err := exec.LookPath(name); err != nil {
				return failed("this row needs node and npm: %v", err), nil
			}
		}
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return outcome{}, err
		}
		if err := pyenv.Tool(ctx, w.cache, "npm", "install", "--no-audit", "--no-fund", "--prefix", dir, nodeClient); err != nil {
			return failed("this row needs npm's package index: %v", err), nil
		}
	}
	readme, err := os.ReadFile(filepath.Join(dir, "node_modules/openai/README.md"))
	if err != nil {
		return outcome{}, err
	}
	var programs []program
	write := func(name, text string) error {
		file := filepath.Join(dir, name+".mjs")
		programs = append(programs, program{name, []string{"node", file}, dir})
		return os.WriteFile(file, []byte(text), 0o644)
	}
	var errs []error
	for i, found := range block.FindAllStringSubmatch(string(readme), -1) {
		code := found[1]
		if !strings.Contains(code, "chat.completions.create") || strings.Contains(code, "workloadIdentity") || strings.Contains(code, "Azure") ||
			!strings.Contains(code, "import OpenAI") {
			continue // of another service, or a piece of a program
		}
		errs = append(errs, write(fmt.Sprintf("readme-%d", i), theirModel.ReplaceAllString(code, ourModel)))
	}
	if len(programs) == 0 {
		return failed("the README of %s has no example that asks for a chat completion", nodeClient), nil
	}
	if err := errors.Join(append(errs, write("client", string(nodeScript)))...); err != nil {
		return outcome{}, err
	}
	return runClients(ctx, w, "plain", programs)
}

// program is a client's.
type program struct {
	name string
	args []string
	dir  string
}

// private is what differs in the output of two runs.
var private = []struct{ pattern, with string }{
	{`"?(chat)?cmpl-[\w-]+"?`, "ID"},
	{`"created": ?\d+`, "CREATED"},
	{`created=\d+`, "CREATED"},
	{`vllm-[\w.-]+`, "FINGERPRINT"},
	{`(?m)^(None|[0-9a-f]{32}|req[\w-]+|ek[\w-]+|ID)$`, "REQUEST-ID"}, // plain vLLM sends none
	{`"?(cached_tokens|created_cache_tokens)"?[:=] ?(\d+|null|None)`, "CACHED"},
	{`(?m)^\s*"(token_ids|prompt_token_ids)": (null),?\n`, ""}, // see mayDiffer
	{`completion_tokens_details=.*`, "DETAILS"},
	{`(?m)^  File ".*\n(    .*\n)*`, ""},
}

// chunkText is the text of a chunk that an example prints as JSON.
var chunkText = regexp.MustCompile(`"(content|finish_reason)": "((?:[^"\\]|\\.)*)"`)

func shorn(text string) string {
	if strings.Contains(text, `"chat.completion.chunk"`) { // how a text is cut into chunks depends on how busy the engine is
		var joined strings.Builder
		for _, found := range chunkText.FindAllStringSubmatch(text, -1) {
			joined.WriteString(found[2])
		}
		return joined.String()
	}
	for _, p := range private {
		text = regexp.MustCompile(p.pattern).ReplaceAllString(text, p.with)
	}
	return text
}

// runClients runs each program against an engine, twice, and against evenkeel.
func runClients(ctx context.Context, w *site, engine string, programs []program) (outcome, error) {
	o := outcome{verdict: pass}
	var seen []string
	for _, p := range programs {
		var out [3]string
		for i, url := range []string{w.engines[engine].url(), w.engines[engine].url(), w.proxy.URL()} {
			ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
			cmd := exec.CommandContext(ctx, p.args[0], p.args[1:]...)
			cmd.Dir = p.dir
			cmd.Env = append(os.Environ(), "OPENAI_BASE_URL="+url+"/v1", "OPENAI_API_KEY=none", "ANTHROPIC_BASE_URL="+url, "ANTHROPIC_API_KEY=none",
				"NO_COLOR=1")
			said, err := cmd.CombinedOutput()
			cancel()
			out[i] = shorn(string(said)) + fmt.Sprint("exit: ", err)
			_ = os.WriteFile(filepath.Join(w.Dir, fmt.Sprintf("client-%s-%d.txt", p.name, i)), said, 0o600)
		}
		end := out[0][strings.LastIndex(out[0], "exit: ")+len("exit: "):]
		switch {
		case out[2] == out[0] && end == "<nil>":
			seen = append(seen, p.name)
		case out[2] == out[0]:
			lines := strings.Split(strings.TrimSpace(out[0]), "\n")
			seen = append(seen, fmt.Sprintf("%s, which ends the same way everywhere: %.120s", p.name, lines[max(0, len(lines)-2)]))
		case out[2] == out[1], out[0] != out[1]:
			seen = append(seen, p.name+" (the plain engine's output differs from itself)")
			if o.verdict == pass {
				o.verdict = unsteady
			}
		default:
			o.verdict = fail
			seen = append(seen, p.name+": "+firstDifference(out[0], out[2]))
		}
	}
	o.seen = fmt.Sprintf("%d programs, the same output as with the %s engine: %s", len(programs), engine, strings.Join(seen, "; "))
	if o.verdict == fail {
		o.seen = strings.Join(seen, "; ")
	}
	return o, nil
}

func firstDifference(plain, got string) string {
	a, b := strings.Split(plain, "\n"), strings.Split(got, "\n")
	for i := range a {
		if i >= len(b) || a[i] != b[i] {
			other := "nothing"
			if i < len(b) {
				other = b[i]
			}
			return fmt.Sprintf("line %d: %.200q, not %.200q", i+1, other, a[i])
		}
	}
	return fmt.Sprintf("%d lines more", len(b)-len(a))
}
