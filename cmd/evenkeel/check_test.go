package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/gateway/certs/certtest"
	"evenkeel/gateway/selftest"
)

// evenkeel runs a command line in a process of its own, in a folder, until it
// ends: serve must not get as far as a socket.
func evenkeel(t *testing.T, dir string, args ...string) (status int, out, errs string) {
	t.Helper()
	var o, e strings.Builder
	cmd := exec.CommandContext(t.Context(), os.Args[0], args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, &o, &e
	cmd.Env = append(os.Environ(), asEvenkeel+"=1", engineKeyEnv+"=")
	if err := cmd.Run(); err != nil {
		var exit *exec.ExitError
		require.ErrorAs(t, err, &exit)
		status = exit.ExitCode()
	}
	return status, o.String(), e.String()
}

// What keeps serve from starting is what check refuses, in the same words.
func TestCheckRefusesWhatServeRefuses(t *testing.T) {
	const engines = "listen: 127.0.0.1:0\nadmin: {listen: \"127.0.0.1:0\"}\nengines: {prefill: [{url: \"http://127.77.0.1:9\"}], decode: " +
		"[{url: \"http://127.77.0.2:9\", slots: 4}]}\n"
	for _, tt := range []struct{ name, more, says string }{
		{"a keys file that is not there", "keys_file: keys.yaml", "keys.yaml: no such file or directory"},
		{"a keys file without keys", "keys_file: empty", "no keys; add one with `evenkeel keys new`"},
		{"a fit that is not there", "predictor: {file: fit.json}", "fit.json: no such file or directory"},
		{"a fit that is none", "predictor: {file: empty}", "predictor.file: "},
		{"a secret that is not there", "predictor: {kind: exact, secret_file: secret}", "open secret: no such file or directory"},
		{"a request log in no folder", "log: {requests: nowhere/requests.jsonl}", "log.requests: open nowhere/requests.jsonl: no such file or directory"},
		{"a request log that is a folder", "log: {requests: .}", "log.requests: open .: is a directory"},
		{"a decision log in no folder", "dispatch: {log: {file: nowhere/decisions.jsonl}}", "open nowhere/decisions.jsonl: no such file or directory"},
		{"a certificate that is not there", "tls: {cert_file: c.pem, key_file: k.pem}", "tls: certificate: open c.pem: no such file or directory; its key: open k.pem: no such file or directory"},
		{"a key of engines that is not exported", "profiles: {ascend: {api_key_env: NO_SUCH_VARIABLE_HERE}}", "NO_SUCH_VARIABLE_HERE, which is empty; export it"},
		{"an authority of traces that is not there", "tracing: {endpoint: \"https://127.77.0.3:4317\", tls: {ca_file: ca.pem}}", "open ca.pem: no such file or directory"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			require.NoError(t, os.WriteFile(filepath.Join(dir, "empty"), nil, 0o600))
			require.NoError(t, os.WriteFile(filepath.Join(dir, "evenkeel.yaml"), []byte(engines+tt.more+"\n"), 0o600))
			status, _, errs := evenkeel(t, dir, "serve", "--config", "evenkeel.yaml")
			require.Equal(t, 1, status, errs)
			require.Contains(t, errs, tt.says)

			status, out, errs := evenkeel(t, dir, "check", "--config", "evenkeel.yaml")
			require.Equal(t, 1, status, out+errs)
			require.NotContains(t, out, "ok, ")
			require.Contains(t, errs, tt.says)
			if strings.Contains(tt.says, "no such file") {
				require.Contains(t, errs, "the path is relative to the working directory, "+dir)
			}

			status, out, errs = evenkeel(t, dir, "check", "--config", "evenkeel.yaml", "--json")
			require.Equal(t, 1, status, errs)
			require.Empty(t, errs, "the document says it all")
			var doc checked
			require.NoError(t, json.Unmarshal([]byte(out), &doc))
			require.NotEmpty(t, doc.Errors, out)
			require.Contains(t, doc.Errors[0].Msg, tt.says)
		})
	}
}

func TestCheckTellsEveryErrorAsJSON(t *testing.T) {
	file := write(t, "pool: {size: 0}\nlisten: nowhere\nlimits: {body_bytes: -1}\n")
	status, out, errs := line("check", "--config", file, "--json")
	require.Equal(t, 1, status)
	require.Empty(t, errs)
	var doc checked
	require.NoError(t, json.Unmarshal([]byte(out), &doc))
	require.Equal(t, file, doc.Config)
	require.Len(t, doc.Errors, 3, out)
	for i, want := range []problem{
		{File: file, Line: 1, Column: 14, Key: "pool.size"}, {File: file, Line: 2, Column: 9, Key: "listen"},
		{File: file, Line: 3, Column: 22, Key: "limits.body_bytes"},
	} {
		got := doc.Errors[i]
		require.NotEmpty(t, got.Msg)
		got.Msg = ""
		require.Equal(t, want, got)
	}

	status, out, _ = line("check", "--config", file+".none", "--json")
	require.Equal(t, 1, status)
	require.NoError(t, json.Unmarshal([]byte(out), &doc))
	require.Contains(t, doc.Errors[0].Msg, "no such file")
}

// What serve starts with and would warn of, check tells, too.
func TestCheckWarnsOfWhatIsHardlyMeant(t *testing.T) {
	for _, tt := range []struct{ name, text, about, says string }{
		{"no engines", "", "engines.prefill", "no prefill engine is listed"},
		{"no decode engine", "engines: {prefill: [{url: \"http://p:1\"}]}", "engines.decode", "no decode engine is listed"},
		{"a profile that no engine names", "profiles: {default: {connector: sglang}}\nengines: {prefill: [{url: \"http://p:1\"}], decode: [{url: \"http://d0:1\", slots: 4}]}", "profiles.default", "no engine names this profile"},
		{"no slots", "engines: {decode: [{url: \"http://d0:1\"}]}", "serve", "slots of a decode engine are not set"},
		{"tokens in place of slots", "engines: {decode: [{url: \"http://d0:1\", slots: 131072}]}", "engines.decode[0].slots", "131072 is more than any proxy needs"},
		{"a pool of a billion", "pool: {size: 1000000000}", "pool.size", "1000000000 is more than any proxy needs"},
		{"bodies of a terabyte", "limits: {bodies_bytes: 1099511627776}", "limits.bodies_bytes", "1099511627776 bytes are 1024 GiB"},
		{"bodies of nothing", "limits: {body_bytes: 100}", "limits.body_bytes", "most requests are refused"},
		{"days in place of minutes", "limits: {probe_timeout: 600h}", "limits.probe_timeout", "600h0m0s is more than a day"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			status, out, errs := line("check", "--config", write(t, tt.text+"\n"), "--json")
			require.Equal(t, 0, status, out+errs)
			var doc checked
			require.NoError(t, json.Unmarshal([]byte(out), &doc))
			require.Empty(t, doc.Errors)
			about := map[string]string{}
			for _, f := range doc.Findings {
				require.Equal(t, selftest.Warn, f.Level)
				about[f.Engine] = f.Msg
			}
			require.Contains(t, about[tt.about], tt.says, out)
		})
	}
	status, out, _ := line("check", "--config", "../../configs/evenkeel.yaml", "--json")
	require.Equal(t, 0, status, out)
	require.Contains(t, out, `"findings": []`, "nothing of the example is in doubt")
}

// A fit file that the policies do not read, or only in part, is told of.
func TestCheckWarnsOfAFitThatIsNotRead(t *testing.T) {
	const fitted = `{"evenkeel_fit":1,"kind":"%s","created":"2026-01-01T00:00:00Z","source":{"file":"x","sha256":"","rows":1,"from":"","to":""},"outputs":[[5,1]],"holdout":{}}`
	secret := write(t, "thirty-two bytes that are secret\n")
	for _, tt := range []struct{ name, kind, policy, predictor, says string }{
		{"the default reads the mean", "survival", "evenkeel", "survival", ""},
		{"brh reads all", "survival", "brh", "survival", ""},
		{"br0 reads nothing", "survival", "br0", "survival", "the policy of this config does not look at the lengths of answers"},
		{"nor does it read an exact one", "exact", "jsq-kv", "survival", "the policy of this config does not look at the lengths of answers"},
		{"brh without a predictor", "survival", "brh:predictor=none,horizon=80,gamma=0.9", "survival", "the policy of this config does not look at the lengths of answers"},
		{"exact, and the default reads the mean", "exact", "evenkeel", "survival", "reads only the mean length of answers; fit again with --kind survival"},
		{"exact under survival", "exact", "brh", "survival", "the policy predicts with survival"},
		{"exact under a policy of survival", "exact", "brh:predictor=survival", "exact", "the policy predicts with survival"},
		{"exact under exact", "exact", "brh", "exact", ""},
		{"survival under exact", "survival", "brh", "exact", "the predictor exact begins without what answers to single prompts were"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			config := fmt.Sprintf("dispatch: {policy: %q}\npredictor: {kind: %s, file: %q, secret_file: %q}\n",
				tt.policy, tt.predictor, write(t, fmt.Sprintf(fitted, tt.kind)), secret)
			status, out, errs := line("check", "--config", write(t, config), "--json")
			require.Equal(t, 0, status, out+errs)
			var doc checked
			require.NoError(t, json.Unmarshal([]byte(out), &doc))
			said := ""
			for _, f := range doc.Findings {
				if f.Engine == "predictor.file" {
					said += f.Msg
				}
			}
			if tt.says == "" {
				require.Empty(t, said)
			}
			require.Contains(t, said, tt.says)
		})
	}
}

// Files that a proxy writes are as they were after a check.
func TestCheckLeavesNothingBehind(t *testing.T) {
	dir := t.TempDir()
	there := filepath.Join(dir, "decisions.jsonl")
	require.NoError(t, os.WriteFile(there, []byte("before\n"), 0o600))
	file := write(t, "log: {requests: "+filepath.Join(dir, "requests.jsonl")+"}\ndispatch: {log: {file: "+there+"}}\n")
	status, out, errs := line("check", "--config", file)
	require.Equal(t, 0, status, out+errs)
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, left, 1)
	text, err := os.ReadFile(there)
	require.NoError(t, err)
	require.Equal(t, "before\n", string(text))
}

// Every example that is shipped passes where the files are that it names: only their folders are
// others here.
func TestCheckPassesEveryExample(t *testing.T) {
	dir := t.TempDir()
	authority := certtest.New(t)
	cert, key := authority.Issue(t, "localhost", time.Now().Add(time.Hour))
	_, entry, errs := line("keys", "new", "--name", "team")
	_, keys, ok := strings.Cut(entry, "  - name")
	require.True(t, ok, errs)
	for name, text := range map[string]string{
		"admin.token": strings.Repeat("t", 40), "keys.yaml": "keys:\n  - name" + keys, "peers.key": "k1 " + strings.Repeat("0123456789abcdef", 4), "engines.yaml": "{}",
		"kubeconfig": `{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c, user: u}}],
clusters: [{name: c, cluster: {server: "http://127.0.0.1:1"}}], users: [{name: u, user: {}}]}`,
	} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	there := strings.NewReplacer(
		"/etc/evenkeel/tls.crt", cert, "/etc/evenkeel/tls.key", key, "/etc/evenkeel/ca.crt", cert, "/etc/evenkeel", dir, "/var/log/evenkeel", dir, "ENGINE_API_KEY", "HOME", `kubeconfig: ""`, "kubeconfig: "+filepath.Join(dir, "kubeconfig"),
		"  engine: kubernetes\n", "  engine: kubernetes\n  kubernetes: {kubeconfig: "+filepath.Join(dir, "kubeconfig")+"}\n")
	examples, err := filepath.Glob("../../configs/*.yaml")
	require.NoError(t, err)
	require.Greater(t, len(examples), 4)
	for _, example := range examples {
		text, err := os.ReadFile(example)
		require.NoError(t, err)
		file := filepath.Join(dir, "example.yaml")
		require.NoError(t, os.WriteFile(file, []byte(there.Replace(string(text))), 0o600))
		status, out, errs := evenkeel(t, dir, "check", "--config", file)
		require.Equal(t, 0, status, example+"\n"+out+errs)
	}
}

// A package cannot know its engines. So its config has none that might be other people's machines,
// and is refused until it has some.
func TestThePackagesConfigNamesNoEngine(t *testing.T) {
	text, err := os.ReadFile("../../configs/packages/evenkeel.yaml")
	require.NoError(t, err)
	status, out, errs := line("check", "--config", write(t, string(text)))
	require.Equal(t, 1, status, out)
	require.Contains(t, errs, "engines.prefill: there is nothing behind the key; list the engines under it")
	require.Contains(t, errs, "engines.decode: there is nothing behind the key; list the engines under it")
	status, out, errs = line("check", "--config", write(t, strings.ReplaceAll(string(text), "# - {url", "- {url")))
	require.Equal(t, 0, status, errs)
	require.Contains(t, out, "ok, 1 prefill and 2 decode engines")
}

// A log may be a symlink to a file on another disk. A proxy creates that file, so check does not
// refuse the symlink.
func TestCheckTakesALogThatIsASymlinkToNoFile(t *testing.T) {
	dir, disk := t.TempDir(), t.TempDir()
	log, relative := filepath.Join(dir, "requests.jsonl"), filepath.Join(dir, "relative")
	require.NoError(t, os.Symlink(filepath.Join(disk, "requests.jsonl"), log))
	require.NoError(t, os.Symlink("requests.jsonl", relative))
	for _, path := range []string{log, relative} {
		status, out, errs := line("check", "--config", write(t, "log: {requests: "+path+"}\n"))
		require.Equal(t, 0, status, out+errs)
	}
	left, err := os.ReadDir(disk)
	require.NoError(t, err)
	require.Empty(t, left)
	require.NoError(t, os.Remove(disk))
	status, _, errs := line("check", "--config", write(t, "log: {requests: "+relative+"}\n"))
	require.Equal(t, 1, status)
	require.Contains(t, errs, "log.requests: open "+disk+"/requests.jsonl: no such file or directory")
}

// A check that a signal has ended did not try the engines: a script must not go on as if it had.
func TestACheckThatASignalEndsFails(t *testing.T) {
	var once sync.Once
	asked := make(chan struct{})
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/metrics" { // before a request is sent through the engine
			once.Do(func() { close(asked) })
			<-r.Context().Done()
			return
		}
		_, _ = io.WriteString(w, `{"data":[{"id":"m"}]}`)
	}))
	t.Cleanup(engine.Close)
	file := write(t, "engines: {aggregated: [{url: \""+engine.URL+"\", slots: 4}]}\n")
	var out, errs strings.Builder
	cmd := exec.CommandContext(t.Context(), os.Args[0], "check", "--config", file, "--probe")
	cmd.Stdout, cmd.Stderr = &out, &errs
	cmd.Env = append(os.Environ(), asEvenkeel+"=1", engineKeyEnv+"=")
	require.NoError(t, cmd.Start())
	select {
	case <-asked:
	case <-time.After(patience):
		t.Fatal("the engine was not asked")
	}
	require.NoError(t, cmd.Process.Signal(os.Interrupt))
	var exit *exec.ExitError
	require.ErrorAs(t, cmd.Wait(), &exit, "%s%s", &out, &errs)
	require.Equal(t, 1, exit.ExitCode(), "%s%s", &out, &errs)
	require.NotContains(t, out.String(), "ok, ")
	require.Contains(t, out.String(),
		"the test had to end before all was tried (interrupt signal received); it left out at least 1 requests\n")
	require.Contains(t, errs.String(), "ended by a signal before all engines were tried")
}
