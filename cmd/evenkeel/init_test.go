package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
)

// The file that init writes from flags is the config that serve has with them, and check takes it.
func TestInitWritesWhatServeWouldRunWith(t *testing.T) {
	for _, tt := range []struct{ name, flags string }{
		{"nothing", ""},
		{"engines", "--prefiller-hosts 10.0.0.1 10.0.0.2 --prefiller-ports 8100 8100 --decoder-hosts 10.0.0.3 10.0.0.3 --decoder-ports 8200 8201 --slots 16"},
		{"an IPv6 address", "--prefiller-hosts fd00::1 --prefiller-ports 8100 --decoder-hosts [fd00::2] --decoder-ports 8200"},
		{"another connector", "--connector nixl-pull --slots 4"},
		{"a connector that calls back", "--connector ascend-layerwise --host 10.0.0.9"},
		{"a place for callbacks", "--connector ascend-layerwise --host 10.0.0.9 --metaserver 10.0.0.9:7000"},
		{"engines of several ranks", "--prefill-data-parallel-size 2 --decode-data-parallel-size 4"},
		{"engines that do both", "--aggregated-hosts 10.0.0.1 10.0.0.2 --aggregated-ports 8000 8000 --aggregated-data-parallel-size 8 --slots 64"},
		{"engines of SGLang that do both", "--aggregated-ports 30000 --connector sglang"},
		{"engines of both kinds", "--aggregated-hosts 10.0.0.1 --prefiller-ports 8100 --connector ascend-layerwise --host 10.0.0.9"},
		{"the flags beside a file", "--policy br0 --admin 127.0.0.1:9999 --request-log - --log-level warning"},
		{"retries", "--max-retries 5 --retry-delay 0.25"},
		{"no retries", "--max-retries 1 --retry-delay 0"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			out := filepath.Join(t.TempDir(), "evenkeel.yaml")
			status, _, errs := line(append([]string{"init", "--out", out}, strings.Fields(tt.flags)...)...)
			require.Equal(t, 0, status, errs)
			require.Contains(t, errs, "evenkeel check --config "+out+" --probe")
			got, err := config.Load(out)
			require.NoError(t, err)
			written, err := os.ReadFile(out)
			require.NoError(t, err)
			status, printed, errs := line(append([]string{"init", "--out", "-"}, strings.Fields(tt.flags)...)...)
			require.Equal(t, 0, status, errs)
			require.Equal(t, string(written), printed)

			serving := flags(t, "serve "+tt.flags)
			want, err := serving.loadConfig()
			require.NoError(t, err)
			for _, list := range [][]config.Engine{want.Engines.Decode, want.Engines.Aggregated} { // 32, which serve warns of and the file says
				for i := range list {
					if list[i].Slots == 0 {
						list[i].Slots = 32
					}
				}
			}
			for _, name := range []string{"vllm", "sglang"} { // the flags' profile has no such name
				if p, ok := got.Profiles[name]; ok {
					p.Name = config.DefaultProfile
					got.Profiles[config.DefaultProfile] = p
					delete(got.Profiles, name)
				}
			}
			for _, list := range [][]config.Engine{got.Engines.Prefill, got.Engines.Decode} {
				for i := range list {
					list[i].Profile = config.DefaultProfile
				}
			}
			if len(got.Engines.Prefill)+len(got.Engines.Decode) == 0 { // no engine has it
				want.Profiles[config.DefaultProfile] = got.Profiles[config.DefaultProfile]
			}
			require.Empty(t, config.Diff(want, got))
			status, said, errs := line("check", "--config", out)
			require.Equal(t, 0, status, errs)
			require.Contains(t, said, ": ok, ")
		})
	}
}

func TestInitAsksEngines(t *testing.T) {
	start := func(c refengine.Config) (addr string) {
		c.Steps.C0, c.Prompts.Base = time.Millisecond, time.Millisecond
		e, err := refengine.Start(c)
		require.NoError(t, err)
		t.Cleanup(e.Close)
		return strings.TrimPrefix(e.URLs()[0], "http://")
	}
	p, d, locked := start(refengine.Config{Role: refengine.Prefill}), start(refengine.Config{Role: refengine.Decode}),
		start(refengine.Config{Role: refengine.Decode, Server: refengine.Server{APIKey: "secret"}})
	status, out, errs := line("init", "--probe", "prefill="+p, "decode=http://"+d, locked, "127.0.0.1:1", "--port", "9000")
	require.Equal(t, 1, status, errs)
	cfg, err := config.Parse("init", []byte(out))
	require.NoError(t, err, out)
	require.Equal(t, "localhost:9000", cfg.Listen)
	require.Len(t, cfg.Engines.Prefill, 1)
	require.Len(t, cfg.Engines.Decode, 1)
	require.Equal(t, 32, cfg.Engines.Decode[0].Slots)
	for _, want := range []string{
		`# Its version is 0.27.1.`, `# It serves "ref", with a context of 131072 tokens.`, `# Its KV cache has room for 524288 tokens in all.`,
		"Nothing tells how many requests the rank runs at once", "It wants an API key. Export it as OPENAI_API_KEY", "#   - url: http://" +
			locked,
		"# Nothing that it answers says whether it prefills or decodes.", "It did not answer GET /health", "#   - url: http://127.0.0.1:1\n",
	} {
		require.Contains(t, out, want)
	}
	require.Contains(t, errs, "1 of 4 engines did not tell whether they prefill or decode, and stand in comments only: http://"+locked+
		"; run init again with the role before their addresses")
	require.Contains(t, errs, "1 of 4 engines did not answer: http://127.0.0.1:1 (")
	require.Contains(t, errs, "the config is not complete")

	status, out, errs = line("init", "--probe", start(refengine.Config{Role: refengine.Aggregated, DPSize: 2, DPMode: "internal"}))
	require.Equal(t, 0, status, errs)
	cfg, err = config.Parse("init", []byte(out))
	require.NoError(t, err, out)
	require.Len(t, cfg.Engines.Aggregated, 1)
	require.Equal(t, 2, cfg.Engines.Aggregated[0].Ranks)
	require.Empty(t, cfg.Doubts())
	for _, want := range []string{"# It is an aggregated engine: when it was asked to hand a prompt over, it handed nothing over.",
		"# token_budget: 8192", "# prefill: {index: {tokenize: engine}}"} {
		require.Contains(t, out, want)
	}

	file := filepath.Join(t.TempDir(), "e.yaml")
	status, _, errs = line("init", "--probe", p, d, "--out", file)
	require.Equal(t, 1, status)
	require.Contains(t, errs, "no engine told whether it prefills or decodes (http://"+p+", http://"+d+
		"), and nothing was written; run init again with the role before each address")
	require.NoFileExists(t, file)
}

// Whoever mistypes an address learns it from init, not from clients.
func TestInitSaysWhichEnginesAreDead(t *testing.T) {
	e, err := refengine.Start(refengine.Config{Role: refengine.Prefill, Steps: refengine.Steps{C0: time.Millisecond},
		Prompts: refengine.Prompts{Base: time.Millisecond}})
	require.NoError(t, err)
	t.Cleanup(e.Close)
	alive := strings.TrimPrefix(e.URLs()[0], "http://")
	for _, tt := range []struct {
		name, probe string
		written     bool
		says        string
	}{
		{"all are dead, with roles", "prefill=127.0.0.1:1 decode=127.0.0.1:2", false, "no engine answered, and nothing was written: http://127.0.0.1:1 ("},
		{"all are dead, without roles", "127.0.0.1:1 127.0.0.1:2", false, "no engine answered, and nothing was written: http://127.0.0.1:1 ("},
		{"one of two is dead", "prefill=" + alive + " decode=127.0.0.1:2", true, "1 of 2 engines did not answer: http://127.0.0.1:2 ("},
		{"one is dead, and the other tells no role", alive + " decode=127.0.0.1:2", true, "1 of 2 engines did not answer: http://127.0.0.1:2 ("},
		{"one is dead, and no role is known", alive + " 127.0.0.1:2", false, "1 of 2 engines did not answer: http://127.0.0.1:2 ("},
	} {
		t.Run(tt.name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "e.yaml")
			status, out, errs := line(append([]string{"init", "--out", file, "--probe"}, strings.Fields(tt.probe)...)...)
			require.Equal(t, 1, status, errs)
			require.Empty(t, out)
			require.Contains(t, errs, tt.says)
			if !tt.written {
				require.NoFileExists(t, file)
				return
			}
			cfg, err := config.Load(file)
			require.NoError(t, err)
			require.Equal(t, "http://127.0.0.1:2", cfg.Engines.Decode[0].URL, "the role was named")
		})
	}
}

func TestInitRefuses(t *testing.T) {
	dir := t.TempDir()
	there := filepath.Join(dir, "there.yaml")
	require.NoError(t, os.WriteFile(there, []byte("mine\n"), 0o600))
	require.NoError(t, os.Symlink(filepath.Join(dir, "nowhere"), filepath.Join(dir, "link.yaml")))
	for _, tt := range []struct {
		name, flags string
		status      int
		says        string
	}{
		{"to overwrite", "--out " + there, 1, there + " exists already, and is not overwritten"},
		{"to write through a link", "--out " + filepath.Join(dir, "link.yaml"), 1, "exists already"},
		{"a folder that is not there", "--out " + filepath.Join(dir, "none", "e.yaml"), 1, "--out: open"},
		{"addresses and lists of engines", "--probe 127.0.0.1:1 --decoder-hosts a", 2, "--probe does not go with the flags that list engines"},
		{"a role that is none", "--probe router=127.0.0.1:1", 2, `"router" is no role; write prefill, decode or aggregated`},
		{"an address without a port", "--probe decode=http://10.0.0.1:port", 2, "--probe decode=http://10.0.0.1:port"},
		{"a path", "--probe http://10.0.0.1:8000/v1", 2, "more than a host and a port"},
		{"an address twice", "--probe 127.0.0.1:1 decode=127.0.0.1:1", 2, "the address is given twice"},
		{"a list with commas", "--probe 127.0.0.1:1,127.0.0.1:2", 2, "names more than one engine"},
		{"a policy that is none", "--policy fastest", 2, "fastest"},
		{"a port that is none", "--port 80800", 2, "--port: 80800 is no port"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			status, out, errs := line(append([]string{"init"}, strings.Fields(tt.flags)...)...)
			require.Equal(t, tt.status, status, out+errs)
			require.Empty(t, out)
			require.Contains(t, errs, tt.says)
		})
	}
	text, err := os.ReadFile(there)
	require.NoError(t, err)
	require.Equal(t, "mine\n", string(text))
}

// A disk may be full. A limit of the size of files stands for it here.
func TestInitLeavesNoPartOfAFile(t *testing.T) {
	out := filepath.Join(t.TempDir(), "evenkeel.yaml")
	cmd := exec.Command("sh", "-c", `ulimit -f 1 && exec "$0" init --out "$1"`, os.Args[0], out)
	cmd.Env = append(os.Environ(), asEvenkeel+"=1", engineKeyEnv+"=")
	said, err := cmd.CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(said), "--out: write "+out)
	require.NoFileExists(t, out)
}
