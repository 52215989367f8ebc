package trial

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"evenkeel/bench/lab/laws"
	"evenkeel/bench/lab/load"
	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/survey"
	"evenkeel/engine"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestLoadsFitTheRanks(t *testing.T) {
	e := &Engine{Ranks: 8, Slots: 64}
	all := Loads(e, false)
	var inFlight []int
	for _, l := range all {
		inFlight = append(inFlight, l.InFlight)
		require.Equal(t, l.Open(), l.Share > 0, l.Name)
	}
	require.Equal(t, []int{384, 0, 128, 460}, inFlight)

	e.Slots = 1024
	require.Equal(t, 768, Loads(e, false)[0].InFlight, "clients and proxy share a machine")
	e.Room, e.Context = 10_000, 4096
	for _, l := range Loads(e, false) {
		require.LessOrEqual(t, l.Prompt.Most+l.Output.Most, 4096, l.Name)
		prompt, output := l.means()
		require.LessOrEqual(t, float64(l.InFlight)*(prompt+output), 80_000., "%s has KV room", l.Name)
		require.Equal(t, l.draw(7, 20, 5), l.draw(7, 20, 5), "a block both ways has the same requests")
		require.NotEqual(t, l.draw(7, 20, 5), l.draw(8, 20, 5))
		require.Equal(t, l.Open(), l.draw(7, 20, 5)[19].At > 0)
	}
	for i, short := range Loads(&Engine{Ranks: 2, Slots: 4}, true) {
		require.Less(t, short.Prompt.Median, all[i].Prompt.Median)
	}
}

func TestALawIsFoundByItsName(t *testing.T) {
	names := map[string]bool{}
	for _, l := range laws.All() {
		require.False(t, names[l.Name()], "%s is one law", l.Name())
		names[l.Name()] = true
	}
	e := &Engine{Kind: vLLM, Ranks: 8}
	found, err := Find("deepseek-v3,vllm,h200,8", e)
	require.NoError(t, err)
	require.Len(t, found, 1)
	require.Equal(t, "DeepSeek-V3,vllm,H200,8", found[0].Name())
	found, err = Find("", e)
	require.NoError(t, err)
	require.Greater(t, len(found), 20)
	for _, l := range found {
		require.Equal(t, vLLM, l.Engine)
		require.Equal(t, 8, l.Ranks)
	}
	for name, says := range map[string]string{
		"DeepSeek-V3,vlm,H200,8": `did you mean "vllm"?`,
		"Kimi-K2.5,vllm,TPU,8":   `there is no GPU "TPU" for Kimi-K2.5,vllm, but B200, `,
		"no-such":                "write MODEL,ENGINE,GPU,RANKS as in",
	} {
		_, err := Find(name, e)
		require.ErrorContains(t, err, says)
	}
}

func TestSettingsHaveNoPathsAndNoNames(t *testing.T) {
	require.True(t, slices.IsSorted(asked), "they are searched")
	var told map[string]any
	require.NoError(t, json.Unmarshal([]byte(`{"dp_size":8,"host":"10.0.0.1","model_path":"/home/a/model","moe_a2a_backend":"deepep","quantization":"/home/a/q",
		"enable_dp_attention":true,"api_key":"secret","vllm_config":{"scheduler_config":{"max_num_seqs":64}},"dtype":null}`), &told))
	require.Equal(t, map[string]any{"dp_size": 8., "moe_a2a_backend": "deepep", "enable_dp_attention": true, "max_num_seqs": 64.},
		settings(told))
}

// An engine that has a draft model tells some settings twice.
func TestASettingIsTheOneThatIsLeastDeep(t *testing.T) {
	var told map[string]any
	require.NoError(t, json.Unmarshal([]byte(`{"a_draft":{"model_config":{"quantization":"draft","dtype":"deep"}},"b":{"quantization":"fp8"},"c":{"quantization":"other"},
		"cuda_graph_bs":[1,2,4],"all2all_backend":["a.b.c"],"max_num_seqs":[]}`), &told))
	for range 20 { // maps have no order
		require.Equal(t, map[string]any{"quantization": "fp8", "dtype": "deep", "cuda_graph_bs": []any{1., 2., 4.}}, settings(told))
	}
	told = map[string]any{"cuda_graph_bs": slices.Repeat([]any{1.}, mostNumbers+1)}
	require.Empty(t, settings(told))
}

func TestWordsAreNoHosts(t *testing.T) {
	for _, s := range []string{
		"fp8_e4m3", "0.27.1", "v0.11.0", "0.5.3.post1", "0.11.1rc2.dev45+g3d5c8d4a1.d20251101", "0.10.2+cu128",
		"0.9.2.dev0+g5358cce5f.precompiled", "a.b",
	} {
		require.Equal(t, s, word(s))
	}
	for _, s := range []string{"gpu-7.corp.internal", "10.0.0.7", "10.0.0.7-a", "0.27.1.corp.internal", "0.27.1+gpu.corp.internal", "7.8.corp",
		"a b", "/a", "fe80::1", ""} {
		require.Empty(t, word(s), s)
	}
	for id, want := range map[string]string{
		"deepseek-ai/DeepSeek-V3": "DeepSeek-V3", "/home/a/Llama-3.1_8B/": "Llama-3.1_8B", "http://10.0.0.7:80": "", "ours (secret)": "", "": "",
	} {
		require.Equal(t, want, modelName(id), id)
	}
}

// What is expected is the same each time, and lies where the simulator's claims lie.
func TestWhatIsExpectedUnderALaw(t *testing.T) {
	e := &Engine{Kind: vLLM, Ranks: 8, Slots: 16}
	loads := Loads(e, false)
	by, err := Find("DeepSeek-V3,vllm,H200,8", e)
	require.NoError(t, err)
	runs := 0
	x, err := Expect(t.Context(), e, loads, by, 30*time.Second, func(done, of int) { runs = max(runs, done); require.Equal(t, 2*seeds, of) })
	require.NoError(t, err)
	require.Equal(t, 2*seeds, runs)
	require.Equal(t, []string{"DeepSeek-V3,vllm,H200,8"}, x.Laws)
	require.Len(t, x.Loads, len(loads))
	for i := range x.Loads {
		for _, s := range []Span{x.Loads[i].Tokens, x.Loads[i].TTFT, x.Loads[i].TPOT, x.Loads[i].Rate} {
			require.LessOrEqual(t, s.Low, s.Middle)
			require.LessOrEqual(t, s.Middle, s.High)
		}
		require.Positive(t, x.Loads[i].Rate.Low)
	}
	again, err := Expect(t.Context(), e, loads, by, 30*time.Second, func(int, int) {})
	require.NoError(t, err)
	require.Equal(t, x, again)

	c := Costs(loads, &x, 5*time.Minute, 3)
	require.GreaterOrEqual(t, c.Time, 40*time.Minute)
	require.Greater(t, c.Most, c.Time)
	require.Positive(t, c.Prompts.Low)
	require.Greater(t, c.Input.Low, c.Prompts.Low)
	none := Costs(loads, nil, 5*time.Minute, 3)
	require.Equal(t, 40*time.Minute, none.Time)
	require.Equal(t, 2.*(96*(3*perPlace+perWarmUp)+96*3*perPlace+32*(3*perPlace+perWarmUp)+115*(3*perPlace+perWarmUp)), none.Prompts.Low,
		"each block has so many at least")
	require.Greater(t, Costs(loads, &x, time.Minute, 3).Time, 8*time.Minute, "blocks last as long as their requests")

	ended, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = Expect(ended, e, loads, by, time.Minute, func(int, int) {})
	require.ErrorIs(t, err, context.Canceled)
}

func TestSGLangBalancesAsItWasToldTo(t *testing.T) {
	for method, want := range map[any]string{nil: "rr", "round_robin": "rr", "total_requests": "", "total_tokens": ""} {
		c := own(&Engine{Kind: sglang, Settings: map[string]any{"load_balance_method": method}})
		require.Equal(t, want, c.Spec, method)
		require.Equal(t, want == "", c.Route != nil, method)
	}
}

// made is a pair of blocks whose figures through evenkeel are so many times the others.
func made(base, times float64) Pair {
	b := func(way Way, x float64) Block {
		return Block{Way: way, Sent: 100, OK: 100, Tokens: x, TTFT: x, TTFT95: x, TPOT95: x, Requests: x}
	}
	return Pair{First: Straight, Engine: b(Straight, base), Evenkeel: b(Ours, base*times)}
}

// The machine became half as fast after the first pair, and one pair was disturbed.
func TestAGainIsThatOfThePairs(t *testing.T) {
	p := &Played{Load: &Load{Name: "l", InFlight: 1}, Pairs: []Pair{made(100, 1.09), made(50, 1.11), made(50, 1.10)}}
	require.Equal(t, 200./3, p.Served())
	g := p.Judge()
	require.InDelta(t, 10, g.Tokens.Mean, 1e-9)
	require.InDelta(t, 4.303/1.732, g.Tokens.Off, 0.01)
	require.Equal(t, 3, g.TPOT95.Pairs)

	bad := made(100, 5)
	bad.Evenkeel.Failed = 3
	p.Pairs = append(p.Pairs, bad)
	require.Equal(t, g, p.Judge(), "pairs in which requests failed do not count")
	p.Pairs = []Pair{bad}
	require.Nil(t, p.Judge())
	require.Zero(t, p.Served())
}

// One figure that is no number costs only itself.
func TestTheFileIsWrittenWhateverTheFiguresAre(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	r := New(&Engine{Kind: vLLM, Tokens: nan}, []*Load{{Name: "l", Share: inf}}, &Expectation{Loads: []Expected{{TTFT: Span{Low: -inf}}}})
	l := r.Loads[0]
	l.Pairs, l.Gain, l.Learned = []Pair{made(nan, 2), made(50, 1.1)}, &Gain{Tokens: Interval{Mean: inf}}, &Learned{R2: nan}
	r.Law.Nearest = &survey.Near{Error: nan}
	r.Began = time.Now()
	var file bytes.Buffer
	require.NoError(t, r.JSON(&file))
	var back Report
	require.NoError(t, json.Unmarshal(file.Bytes(), &back))
	require.Equal(t, []float64{0, 50}, []float64{back.Loads[0].Pairs[0].Engine.Tokens, back.Loads[0].Pairs[1].Engine.Tokens})
	require.Zero(t, back.Law.Nearest.Error)
	require.Zero(t, back.Loads[0].Expected.TTFT.Low)
}

// player plays straight to an engine both ways.
func player(t *testing.T, url string) *Player {
	t.Helper()
	return &Player{
		Engine: Engine{Kind: vLLM, Ranks: 2, Slots: 4, Asks: "ref", Tokens: 1}, URLs: map[Way]string{Straight: url, Ours: url},
		Each: 200 * time.Millisecond, Bound: time.Minute, Pairs: 2, Least: 2,
		Told: func(load.Progress, string) {}, Learned: func() *Learned { return nil },
	}
}

func TestBothWaysGetTheSameRequests(t *testing.T) {
	at := start(t)
	p := player(t, at)
	require.NoError(t, p.Measure(t.Context()))
	require.InDelta(t, 1, p.Engine.Tokens, 0.01, "the reference engine counts words")
	r := New(&p.Engine, Loads(&p.Engine, true), nil)
	r.Play(t.Context(), p)
	require.True(t, r.Complete, "%s %s", r.Why, r.Detail)
	for _, l := range r.Loads {
		require.Len(t, l.Pairs, 2, l.Name)
		for i := range l.Pairs {
			x := &l.Pairs[i]
			require.Equal(t, []Way{Straight, Ours}[i], x.First)
			require.Equal(t, []int{l.Requests, l.Requests}, []int{x.Engine.OK, x.Evenkeel.OK}, l.Name)
			require.Equal(t, x.Engine.PromptTokens, x.Evenkeel.PromptTokens)
			require.Equal(t, x.Engine.OutputTokens, x.Evenkeel.OutputTokens)
		}
		require.Equal(t, 2, l.Gain.Tokens.Pairs)
	}
	var text bytes.Buffer
	r.Plan(&text, Costs(Loads(&p.Engine, true), &Expectation{}, time.Second, 2))
	r.Text(&text)
	require.Contains(t, text.String(), "The table of laws has none with 2 ranks of vllm")
	require.Contains(t, text.String(), "2 pairs of")
	require.Contains(t, text.String(), "evenkeel learned no law")
	require.NotContains(t, text.String(), "NOT THE WHOLE")
}

func TestWhatSGLangCountsIsPrinted(t *testing.T) {
	var text bytes.Buffer
	(&Law{Barrier: &Counted{Steps: 1200, WaitMs: 3.14, Beyond: 0.25}}).text(&text)
	require.Contains(t, text.String(),
		"a rank waits 3.14 ms before a step (of 1,200), and the rank with most attention computes 25 % beyond the mean")
}

func start(t *testing.T) (url string) {
	t.Helper()
	e, err := refengine.Start(refengine.Config{Role: refengine.Aggregated, DPMode: "internal", DPSize: 2, Slots: 4,
		Steps: refengine.Steps{C0: time.Millisecond}})
	require.NoError(t, err)
	t.Cleanup(func() { e.Close() })
	return e.URLs()[0]
}

// What was played before the end is kept, and why there is no more is said.
func TestATrialThatEndsEarlyHasWhatItPlayed(t *testing.T) {
	both := func(url string) map[Way]string { return map[Way]string{Straight: url, Ours: url} }
	for name, c := range map[string]struct {
		during func(t *testing.T, cancel func(), p *Player) // the second load
		says   string
	}{
		"a signal":                 {func(_ *testing.T, cancel func(), _ *Player) { cancel() }, "it was ended by a signal"},
		"an engine that is down":   {func(_ *testing.T, _ func(), p *Player) { p.URLs = both("http://127.0.0.1:1") }, "requests failed; look into the engine's log"},
		"an engine that is silent": {func(t *testing.T, _ func(), p *Player) { p.URLs = both(silence(t)) }, "requests had no whole answer after 10s"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			p := player(t, start(t))
			p.Bound = 10 * time.Second
			r := New(&p.Engine, Loads(&p.Engine, true), nil)
			p.Told = func(_ load.Progress, what string) {
				if strings.HasPrefix(what, r.Loads[1].Name) {
					p.Told = func(load.Progress, string) {}
					c.during(t, cancel, p)
				}
			}
			r.Play(ctx, p)
			require.False(t, r.Complete)
			require.Contains(t, r.Why, c.says)
			require.True(t, r.Any())
			require.Len(t, r.Loads[0].Pairs, 2)
			require.Less(t, len(r.Loads[1].Pairs), 2)
			var text, file bytes.Buffer
			r.Text(&text)
			require.Contains(t, text.String(), "THIS IS NOT THE WHOLE TRIAL: ")
			require.Contains(t, text.String(), "not measured")
			require.NoError(t, r.JSON(&file))
			require.NotContains(t, file.String(), "127.0.0.1", "the file has no hosts")
		})
	}
}

// silence takes connections and answers nothing.
func silence(t *testing.T) (url string) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { ln.Close() })
	return "http://" + ln.Addr().String()
}

func TestAnEngineThatAnswersNothingIsNotPlayed(t *testing.T) {
	p := player(t, silence(t))
	p.Bound = 100 * time.Millisecond
	require.ErrorContains(t, p.Measure(t.Context()), "of 4 requests for a few tokens were not answered")
}

// Prompts get their length by what the engine counts in the first ones.
func TestAnEngineThatCountsNoPromptsIsNotPlayed(t *testing.T) {
	u, err := url.Parse(start(t))
	require.NoError(t, err)
	for counts, says := range map[int]string{1: "counts 4 tokens in prompts of 800 words", 900_000: "counts 3600000 tokens in"} {
		proxy := httputil.NewSingleHostReverseProxy(u)
		proxy.ModifyResponse = func(r *http.Response) error {
			text, err := io.ReadAll(r.Body)
			r.Body.Close()
			text = regexp.MustCompile(`"prompt_tokens":\d+`).ReplaceAll(text, fmt.Appendf(nil, `"prompt_tokens":%d`, counts))
			text = regexp.MustCompile(`"total_tokens":\d+`).ReplaceAll(text, fmt.Appendf(nil, `"total_tokens":%d`, counts+4))
			r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(text)), int64(len(text))
			r.Header.Del("Content-Length")
			return err
		}
		s := httptest.NewServer(proxy)
		p := player(t, s.URL)
		require.ErrorContains(t, p.Measure(t.Context()), says)
		s.Close()
	}
}

// A page that cannot be read is something else than a page that does not tell of steps.
func TestWhyNoLawIsCompared(t *testing.T) {
	var text bytes.Buffer
	broken := &survey.Series{Err: errors.New("503 Service Unavailable")}
	l := Explain(&Engine{Kind: vLLM, Ranks: 2}, nil, []*survey.Series{broken})
	require.True(t, l.Unread)
	l.text(&text)
	require.Contains(t, text.String(), "could not be read (503 Service Unavailable)")
	require.NotContains(t, text.String(), "--enable-metrics")
	text.Reset()
	l = Explain(&Engine{Kind: vLLM, Ranks: 2}, nil, []*survey.Series{{}})
	require.False(t, l.Unread)
	l.text(&text)
	require.Contains(t, text.String(), "SGLang needs --enable-metrics")
}

func TestTheEngineIsAsked(t *testing.T) {
	u, err := url.Parse(start(t))
	require.NoError(t, err)
	client := engine.NewClient(engine.Options{})
	defer client.Close()
	e := Ask(t.Context(), client, &engine.Target{ID: u.Host, URL: u, Rank: -1})
	e.Count(2, 4)
	require.Equal(t, Engine{Kind: vLLM, Version: "0.27.1", Model: "ref", Asks: "ref", Ranks: 2, Slots: 4, Room: 524_288, Context: 131_072}, e)
}
