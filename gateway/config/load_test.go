package config

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher"
	"evenkeel/dispatcher/board"
	"evenkeel/mooncake"
)

var update = flag.Bool("update", false, "write the golden files anew")

func TestAnEmptyFileIsAllDefaults(t *testing.T) {
	for name, text := range map[string]string{
		"no byte": "", "a comment": "# nothing\n", "an empty document": "---\n", "a part without keys": "limits:\nprefill: {}\n",
	} {
		c, err := Parse("f.yaml", []byte(text))
		require.NoError(t, err, name)
		want := Default()
		require.NoError(t, want.Validate())
		c.source, want.source = source{}, source{}
		require.Equal(t, want, c, name)
	}
}

// TestDefaults is the list an operator relies on: a change here is a line in
// the changelog.
func TestDefaults(t *testing.T) {
	c, err := Parse("f.yaml", []byte("engines:\n  prefill: [{url: \"http://p0\"}]\n  decode: [{url: \"https://d0\"}]\n"))
	require.NoError(t, err)
	require.Equal(t, ":8000", c.Listen)
	require.Equal(t, Admin{Listen: "127.0.0.1:9090", Receipts: 10_000, ReceiptsBytes: 64 << 20}, c.Admin)
	require.Empty(t, c.KeysFile)
	require.True(t, c.SelfTest)
	require.Equal(t, dispatcher.Config{
		Config:      board.Config{Policy: "evenkeel", Window: 3 * time.Millisecond, TickLimit: 20 * time.Millisecond},
		DecisionLog: dispatcher.DecisionLogConfig{MaxBytes: 256 << 20},
	}, c.Dispatch)
	require.Equal(t, board.PredictorConfig{Kind: "survival"}, c.Predictor)
	require.Equal(t, Pool{Size: 1024, TTL: 0}, c.Pool)
	require.Equal(t, Log{Level: "info"}, c.Log)
	require.Equal(t, Limits{
		Body: 32 << 20, Bodies: 2 << 30, Head: 16 << 10, ClientLag: 5 * time.Minute, ClientBacklog: 256 << 10, Connections: 65536,
		EventBytes: 8 << 20, AnswerBytes: 64 << 20, ResumeBytes: 256 << 20, Answers: 128, AnswersPerPrompt: 8, StopStrings: 16,
		PassedThrough: 2048,
		ReadTimeout:   30 * time.Second, IdleTimeout: 90 * time.Second, WriteTimeout: 30 * time.Second, ConnectTimeout: 3 * time.Second,
		ProbeTimeout: 10 * time.Minute, ProbeGrace: time.Second, EventTimeout: 2 * time.Minute, DrainGrace: 2 * time.Second,
		DrainTimeout: 5 * time.Minute,
	}, c.Limits)
	require.Equal(t, []Engine{{URL: "http://p0", Profile: "ascend"}}, c.Engines.Prefill)
	require.Equal(t, []Engine{{URL: "https://d0", Profile: "ascend", Group: "main", Barrier: "dp", Cost: 1}}, c.Engines.Decode,
		"slots 0: assumed and warned about where it is used")
	require.Equal(t, map[string]mooncake.Profile{
		"ascend":     mooncake.Profile{Name: "ascend"}.WithDefaults(),
		"aggregated": mooncake.Profile{Name: "aggregated", Connector: mooncake.None}.WithDefaults(),
	}, c.Profiles)
	require.Equal(t, mooncake.AscendMooncakeV1, c.Profiles["ascend"].Connector)
	require.Equal(t, 480*time.Second, c.Profiles["ascend"].KVHoldTimeout)
}

func TestAKeyChangesItselfOnly(t *testing.T) {
	c, err := Parse("f.yaml", []byte("prefill:\n  queue: {max: 5}\nlimits: {idle_timeout: 1m30s}\n"))
	require.NoError(t, err)
	want := Default()
	want.Prefill.Queue.Max = 5
	want.Limits.IdleTimeout = 90 * time.Second
	require.NoError(t, want.Validate())
	c.source, want.source = source{}, source{}
	require.Equal(t, want, c)
}

func TestADecodeEngineTakesWhatItLeavesOutFromItsProfile(t *testing.T) {
	c, err := Parse("f.yaml", []byte(`
profiles: {big: {max_num_seqs: 48, kv_tokens_per_rank: 400000}}
engines:
  decode:
    - {url: "http://d0:1", profile: big}
    - {url: "http://d1:1", profile: big, slots: 8, kv_tokens: 9, cost: 2, group: b, barrier: none}
`))
	require.NoError(t, err)
	require.Equal(t, []Engine{
		{URL: "http://d0:1", Profile: "big", Group: "main", Barrier: "dp", Slots: 48, KV: 400_000, Cost: 1},
		{URL: "http://d1:1", Profile: "big", Group: "b", Barrier: "none", Slots: 8, KV: 9, Cost: 2},
	}, c.Engines.Decode)
}

func TestAnchorsAndMergesAreRead(t *testing.T) {
	c, err := Parse("f.yaml", []byte("profiles:\n  x: &x\n    connector: nixl-pull\n  y:\n    <<: *x\n    max_num_seqs: 5\n  z: *x\n"))
	require.NoError(t, err)
	require.Equal(t, mooncake.NIXLPull, c.Profiles["y"].Connector)
	require.Equal(t, 5, c.Profiles["y"].MaxNumSeqs)
	require.Equal(t, mooncake.NIXLPull, c.Profiles["z"].Connector)
}

func TestErrorsPointAtTheFile(t *testing.T) {
	for _, tc := range []struct {
		name, text string
		want       string // the whole text
	}{
		{
			"a misspelt key names those there are", "pool:\n  sice: 5\n",
			"f.yaml:2:3: pool.sice: no such key (did you mean \"size\"?); the keys here are size, ttl\n" +
				"     1 | pool:\n" +
				">    2 |   sice: 5",
		},
		{
			"a key written twice names the first", "pool:\n  size: 5\n  ttl: 1s\n  size: 6\n",
			"f.yaml:4:3: pool.size: the key is written twice, first in line 2; remove one\n" +
				"     3 |   ttl: 1s\n" +
				">    4 |   size: 6",
		},
		{
			"a time without a unit is refused, not read as nanoseconds", "pool: {ttl: 20}",
			"f.yaml:1:13: pool.ttl: 20 has no unit; write 20s for seconds, or use ms, m, h\n" +
				">    1 | pool: {ttl: 20}",
		},
		{
			"a TTL above the hold budget says which engine keeps how long",
			"pool:\n  ttl: 20s\nprofiles:\n  n: {connector: nixl-pull}\nengines:\n  prefill: [{url: \"http://p:1\", profile: n}]\n",
			"f.yaml:2:8: pool.ttl: 20s is longer than prefill engine http://p:1 (profile n) holds a finished prefill for the pool: 15s of its " +
				"30s; lower pool.ttl to 15s, or raise the engine's hold timeout and the profile's kv_hold_timeout\n" +
				"     1 | pool:\n" +
				">    2 |   ttl: 20s\n" +
				"     3 | profiles:",
		},
		{
			"YAML that is none", "listen: \":1\n",
			"f.yaml:1:9: could not find end character of double-quoted text\n" +
				">    1 | listen: \":1",
		},
		{
			"a default that cannot be is told at its parent",
			"profiles:\n  a:\n    connector: nixl-pull\n    kv_hold_timeout: 10s\n    hold_margin: 10s\n",
			"f.yaml:2:3: profiles.a: profile \"a\": hold_margin 10s leaves nothing of kv_hold_timeout 10s; lower it or raise the engine's " +
				"timeout\n" +
				"     1 | profiles:\n" +
				">    2 |   a:\n" +
				"     3 |     connector: nixl-pull",
		},
		{
			"a second document would be ignored", "listen: \":1\"\n---\nlisten: \":2\"\n",
			"f.yaml:3:7: a second document begins here; only one is read, remove the --- above\n" +
				"     2 | ---\n" +
				">    3 | listen: \":2\"",
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, err := Parse("f.yaml", []byte(tc.text))
			require.EqualError(t, err, tc.want)
			require.Nil(t, c)
		})
	}
}

// A file that a template made may begin with two lines ---. What it says must not be left out: it
// may ask for API keys.
func TestNothingOfAFileIsLeftOut(t *testing.T) {
	for text, place := range map[string]string{
		"---\n# Made from a template.\n---\nkeys_file: k\n":    "f.yaml:4:1: ",
		"---\n---\nkeys_file: k\n":                             "f.yaml:3:1: ",
		"pool: {size: 5}\n---\n\n---\n# Keys.\nkeys_file: k\n": "f.yaml:6:1: ",
	} {
		_, err := Parse("f.yaml", []byte(text))
		require.ErrorContains(t, err, place+"this and all that follows would not be read", text)
	}
	_, err := Default().ParseEngines("f.yaml", []byte("---\n---\ndecode: [{url: \"http://d:1\"}]\n"))
	require.ErrorContains(t, err, "f.yaml:3:1: ")
	c, err := Parse("f.yaml", []byte("# Made from a template.\n---\nkeys_file: k\n"))
	require.NoError(t, err)
	require.Equal(t, "k", c.KeysFile)
}

// A list of engines may be cut off where it is written in place. It must not seem to have no
// engines.
func TestAListThatIsCutOffBehindAKeyIsRefused(t *testing.T) {
	for _, text := range []string{
		"prefill: [{url: \"http://p:1\"}]\ndecode:\n", "decode: ~", "decode: null # none", "aggregated:\n# d0\n", "decode:\nprefill:\n",
	} {
		_, err := Default().ParseEngines("f.yaml", []byte(text))
		require.ErrorContains(t, err, "list the engines under it, or write [] for a side that is meant to have no engines", text)
		_, err = Parse("f.yaml", []byte("engines:\n  "+strings.ReplaceAll(text, "\n", "\n  ")))
		require.ErrorContains(t, err, "write [] for a side that is meant to have no engines", text)
	}
	e, err := Default().ParseEngines("f.yaml", []byte("prefill: [{url: \"http://p:1\"}]\ndecode: []\n"))
	require.NoError(t, err)
	require.Len(t, e.Prefill, 1)
	require.Empty(t, e.Decode)
}

// TestEveryProblemIsToldAtOnce holds the whole text of two files that are wrong
// all over, one in its shape and one in its values.
func TestEveryProblemIsToldAtOnce(t *testing.T) {
	for _, name := range []string{"shape", "values"} {
		t.Run(name, func(t *testing.T) {
			src, err := os.ReadFile(filepath.Join("testdata", name+".yaml"))
			require.NoError(t, err)
			_, err = Parse(name+".yaml", src)
			require.Error(t, err)
			golden := filepath.Join("testdata", name+".golden")
			if *update {
				require.NoError(t, os.WriteFile(golden, []byte(err.Error()+"\n"), 0o644))
			}
			want, ferr := os.ReadFile(golden)
			require.NoError(t, ferr)
			require.Equal(t, strings.TrimSuffix(string(want), "\n"), err.Error())
			again, last := errorsOf(err), 0
			for _, e := range again {
				require.GreaterOrEqual(t, e.Line, last, "in the order of the file")
				last = e.Line
			}
		})
	}
}

// errorsOf takes a joined error apart.
func errorsOf(err error) (list []*Error) {
	var joined interface{ Unwrap() []error }
	if errors.As(err, &joined) {
		for _, e := range joined.Unwrap() {
			list = append(list, errorsOf(e)...)
		}
		return list
	}
	var e *Error
	if errors.As(err, &e) {
		list = append(list, e)
	}
	return list
}

// TestKeysAndDefaultsStand: the keys in the order in which errors list them, and each
// value of an empty file as a reload prints it.
func TestKeysAndDefaultsStand(t *testing.T) {
	c := Default()
	require.NoError(t, c.Validate())
	var got strings.Builder
	for _, key := range keysBelow(reflect.TypeFor[Config](), "$") {
		fmt.Fprintln(&got, key)
	}
	for _, change := range Diff(&Config{}, c) {
		fmt.Fprintln(&got, change)
	}
	golden := filepath.Join("testdata", "defaults.golden")
	if *update {
		require.NoError(t, os.WriteFile(golden, []byte(got.String()), 0o644))
	}
	want, err := os.ReadFile(golden)
	require.NoError(t, err)
	require.Equal(t, string(want), got.String())
}

func TestInputThatPanicsTheLibraryIsAnError(t *testing.T) {
	for _, text := range []string{"keys: !x y", "keys_file: !x y", "!x y", "a: !!binary x", "? !x\n: y", "- !a &b *c"} {
		_, err := Parse("f.yaml", []byte(text))
		require.Error(t, err, text)
		require.Contains(t, err.Error(), "f.yaml", text)
	}
}

func TestLoadNamesTheFileItCannotRead(t *testing.T) {
	_, err := Load(filepath.Join(t.TempDir(), "none.yaml"))
	require.ErrorIs(t, err, os.ErrNotExist)
	require.ErrorContains(t, err, "none.yaml")

	path := filepath.Join(t.TempDir(), "ek.yaml")
	require.NoError(t, os.WriteFile(path, []byte("listen: \":81\"\n"), 0o600))
	c, err := Load(path)
	require.NoError(t, err)
	require.Equal(t, ":81", c.Listen)
}

// A proxy that runs must not take the memory for a file that was put there by mistake.
func TestAFileThatIsMuchTooLargeIsNotRead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ek.yaml")
	require.NoError(t, os.WriteFile(path, []byte("# A picture of the memory.\n"), 0o600))
	require.NoError(t, os.Truncate(path, 64<<20))
	_, err := Load(path)
	require.ErrorContains(t, err, "larger than 16777216 bytes; is it the right file?")
	require.ErrorContains(t, err, path)
}

// FuzzParse: whatever the file says, the answer is a valid config or an error
// that names the file, and what is valid stays so.
func FuzzParse(f *testing.F) {
	for _, text := range []string{
		"", "keys: !x y", "pool: {ttl: 20}", "a: b: c", "\tx", "- a", "listen: |\n  x", "profiles: {x: &d {connector: nixl-pull}, y: *d}",
		"<<: *x", "? a\n: b",
		"engines: {decode: [{url: 'http://d:1', slots: 4, cost: 1e400}]}", "geo: {mode: off}", "limits: {body_bytes: 0x7fffffffffffffff}",
		"---\n...\n---\n", "%YAML 1.2\n---\n{}",
		"&0\n*0", "profiles: {\"\": {}, \"a.b[0]\": {dp_mode: x}}",
	} {
		f.Add([]byte(text))
	}
	for _, name := range []string{"shape.yaml", "values.yaml", "../../../configs/evenkeel.yaml"} {
		if src, err := os.ReadFile(filepath.Join("testdata", name)); err == nil {
			f.Add(src)
		}
	}
	f.Fuzz(func(t *testing.T, src []byte) {
		c, err := Parse("f.yaml", src)
		if err != nil {
			require.Nil(t, c)
			found := errorsOf(err)
			require.NotEmpty(t, found, "%v", err)
			for _, e := range found {
				require.Equal(t, "f.yaml", e.File)
				require.NotEmpty(t, e.Msg)
			}
			return
		}
		require.NoError(t, c.Validate(), "a second look changes nothing")
	})
}

// Group 1.10 is not group 1.1, and the zeros at the beginning of a token belong to it.
func TestATextThatLooksLikeANumberIsNotChanged(t *testing.T) {
	headers := func(word string) []byte { return []byte("tracing: {headers: {token: " + word + "}}\n") }
	for _, word := range []string{"1.10", "007", "0x10", "1_000", "1e3", "12e4567", "+5"} {
		c, err := Parse("f.yaml", headers(word))
		if err == nil {
			require.Equal(t, word, c.Tracing.Headers["token"])
		} else {
			require.ErrorContains(t, err, "tracing.headers.token: YAML reads "+word+" as the number")
		}
		c, err = Parse("f.yaml", headers("\""+word+"\""))
		require.NoError(t, err, word)
		require.Equal(t, word, c.Tracing.Headers["token"])
	}
	_, err := Parse("f.yaml", []byte("engines: {decode: [{url: \"http://d:1\", group: 1.10}]}\n"))
	require.ErrorContains(t, err, "engines.decode[0].group: YAML reads 1.10 as the number 1.1; if this text is meant, write it in quotes")
	for _, word := range []string{"8200", "1.5", "-3", "0"} {
		c, err := Parse("f.yaml", headers(word))
		require.NoError(t, err, word)
		require.Equal(t, word, c.Tracing.Headers["token"])
	}
}

// A terminal is shown what is wrong with a file that is no text, and nothing else of it.
func TestWhatIsNoTextIsNotShownToATerminal(t *testing.T) {
	_, err := Parse("f.yaml", []byte("\x1b[2J\x00\xff"+strings.Repeat("x", 500)+"\n"))
	require.Error(t, err)
	require.NotContains(t, err.Error(), "\x1b")
	require.Less(t, len(err.Error()), 500)
}
