package prompt

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/openai"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// tells is an engine that says the token ids of a prompt, one for two bytes of what it is asked.
type tells struct {
	mu     sync.Mutex
	bodies []string
	status int  // with which it tells; 0: 200
	slow   bool // it takes a while to tell, and never falls silent
	target *engine.Target
}

func (e *tells) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	e.mu.Lock()
	e.bodies = append(e.bodies, r.URL.Path+" "+string(body))
	status, slow := e.status, e.slow
	e.mu.Unlock()
	w.WriteHeader(cmp.Or(status, http.StatusOK))
	// An engine that speaks all the time and is not done: only the limit of the whole ends it.
	for end := time.Now().Add(time.Second); slow && time.Now().Before(end) && r.Context().Err() == nil; time.Sleep(time.Millisecond) {
		_, _ = io.WriteString(w, " ")
		_ = http.NewResponseController(w).Flush()
	}
	ids := make([]int, len(body)/2)
	for i := range ids {
		ids[i] = int(body[2*i])<<8 | int(body[2*i+1])
	}
	_ = json.NewEncoder(w).Encode(map[string]any{"tokens": ids})
}

func (e *tells) asked() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.bodies)
}

// AnyPrefill makes it a fleet of one engine.
func (e *tells) AnyPrefill(model string) *engine.Target {
	if model == "unknown" {
		return nil
	}
	return e.target
}

// newReader is a reader that asks an engine, if its config says so.
func newReader(t *testing.T, change func(*prefill.IndexConfig)) (*Reader, *tells) {
	t.Helper()
	e := &tells{}
	server := httptest.NewServer(e)
	t.Cleanup(server.Close)
	at, err := url.Parse(server.URL)
	require.NoError(t, err)
	e.target = &engine.Target{ID: at.Host, URL: at, Rank: -1}
	client := engine.NewClient(engine.Options{})
	t.Cleanup(client.Close)
	cfg := config.Default()
	cfg.Prefill.Index.TokenizeTimeout = 10 * time.Second
	if change != nil {
		change(&cfg.Prefill.Index)
	}
	set := fleet.NewSettings(cfg)
	scheduler, err := prefill.New(prefill.Config{Policy: cfg.Prefill.Policy, Log: zap.NewNop()})
	require.NoError(t, err)
	return NewReader(Config{
		Client: client, Fleet: e, Prefill: scheduler, Settings: func() *fleet.Settings { return set }, Registerer: prometheus.NewRegistry(),
		Log: zap.NewNop(),
	}), e
}

// byEngine has prompts tokenized by engines.
func byEngine(c *prefill.IndexConfig) { c.Tokenize = prefill.TokenizeEngine }

// parts are those of a request's first prompt.
func parts(t *testing.T, ep mooncake.Endpoint, body string) *Source {
	t.Helper()
	req, fail := openai.Parse(ep, []byte(body), openai.Limits{})
	require.Nil(t, fail, "%v", fail)
	return &Source{Req: req, Body: &req.Body, Changes: &req.Parts()[0].Patch, Model: roster.Route{Name: req.Model, Board: req.Model}}
}

func completion(text string) string { return fmt.Sprintf(`{"model":"m","prompt":%q}`, text) }

var long = strings.Repeat("All of this was said before. ", 40) // 1160 bytes: 4 blocks of 256

// Prompts share the blocks of what they begin with, and only with prompts of the same scope.
func TestPromptsShareTheBlocksOfTheirBeginning(t *testing.T) {
	r, _ := newReader(t, nil)
	first := r.CacheKeys(parts(t, mooncake.Completions, completion(long)))
	require.Len(t, first.Keys, 4)
	require.Equal(t, []int{0, 0}, []int{first.BlockTokens, first.Tokens})
	require.False(t, first.Salted || first.Media)

	require.Equal(t, first.Keys, r.CacheKeys(parts(t, mooncake.Completions, completion(long+"And this was not."))).Keys[:4])
	require.NotContains(t, r.CacheKeys(parts(t, mooncake.Completions, completion("But. "+long))).Keys, first.Keys[0])
	require.NotContains(t, r.CacheKeys(parts(t, mooncake.Completions, strings.Replace(completion(long), `"m"`, `"other"`, 1))).Keys, first.Keys[0])
	lora := parts(t, mooncake.Completions, completion(long))
	lora.Model.Name = "lora"
	require.NotContains(t, r.CacheKeys(lora).Keys, first.Keys[0], "a LoRA makes other KV of the same text")
	former := r.CacheKeys(lora)
	lora.Model.Weights = 2
	require.NotContains(t, r.CacheKeys(lora).Keys, former.Keys[0], "the LoRA was loaded again, perhaps with other weights")

	several := parts(t, mooncake.Completions, fmt.Sprintf(`{"model":"m","prompt":["no",%q]}`, long))
	several.Changes = &several.Req.Parts()[1].Patch
	require.Equal(t, first.Keys, r.CacheKeys(several).Keys, "the leg's prompt, not the body's list")
}

// A salt that was made for one request means that no other will ever share its prompt.
func TestAPromptWithASaltOfItsOwnHasNoKeys(t *testing.T) {
	r, _ := newReader(t, nil)
	with := func(salt string) prefill.Prompt {
		return r.CacheKeys(parts(t, mooncake.Completions, fmt.Sprintf(`{"model":"m","prompt":%q,"cache_salt":%q}`, long, salt)))
	}
	require.Equal(t, prefill.Prompt{}, with("a"))
	shared := with("a")
	require.Len(t, shared.Keys, 4)
	require.True(t, shared.Salted)
	require.Equal(t, prefill.Prompt{}, with("b"))
	require.NotContains(t, with("b").Keys, shared.Keys[0], "another salt is another scope")
	unsalted := r.CacheKeys(parts(t, mooncake.Completions, fmt.Sprintf(`{"model":"m","prompt":%q}`, long)))
	null := r.CacheKeys(parts(t, mooncake.Completions, fmt.Sprintf(`{"model":"m","prompt":%q,"cache_salt":null}`, long)))
	require.NotEmpty(t, unsalted.Keys)
	require.Equal(t, unsalted, null, "null is no salt")
}

func TestTokenIDsAreCountedAndHashedAsTheyAre(t *testing.T) {
	r, e := newReader(t, byEngine)
	ids := make([]string, 40)
	for i := range ids {
		ids[i] = fmt.Sprint(i)
	}
	p := r.CacheKeys(parts(t, mooncake.Completions, `{"model":"m","prompt":[`+strings.Join(ids, ",")+`]}`))
	require.Equal(t, 40, p.Tokens)
	require.Equal(t, r.Prefill.BlockTokens("m"), p.BlockTokens)
	require.Len(t, p.Keys, 40/p.BlockTokens)
	require.Zero(t, p.Bytes)
	require.Empty(t, e.asked(), "nothing has to be tokenized")
}

// The system prompt of Messages and the instructions of Responses are not in the list of messages,
// but stand before it.
func TestWhatStandsBeforeAPromptTellsItFromOthers(t *testing.T) {
	r, _ := newReader(t, nil)
	for name, c := range map[string]struct {
		ep   mooncake.Endpoint
		body string
	}{
		"messages":  {mooncake.Messages, `{"model":"m","max_tokens":9,"system":"%s","messages":[{"role":"user","content":"` + long + `"}]}`},
		"responses": {mooncake.Responses, `{"model":"m","instructions":"%s","input":"` + long + `"}`},
	} {
		polite := r.CacheKeys(parts(t, c.ep, fmt.Sprintf(c.body, "Be polite.")))
		require.NotEmpty(t, polite.Keys, name)
		require.Equal(t, polite, r.CacheKeys(parts(t, c.ep, fmt.Sprintf(c.body, "Be polite."))), name)
		require.NotContains(t, r.CacheKeys(parts(t, c.ep, fmt.Sprintf(c.body, "Be short."))).Keys, polite.Keys[0], name)
	}
}

// What an engine told of a prompt is not asked again.
func TestAnEngineIsAskedOnceForAPrompt(t *testing.T) {
	r, e := newReader(t, byEngine)
	const words = `"messages":[{"role":"user","content":"Hello"}],"tools":[{"type":"function","function":{"name":"f"}}]}`
	chat := `{"model":"m","temperature":0.5,` + words
	first := r.CacheKeys(parts(t, mooncake.Chat, chat))
	require.Equal(t, []string{`/tokenize {"model":"m",` + words}, e.asked())
	require.Equal(t, (len(e.asked()[0])-len("/tokenize "))/2, first.Tokens)
	require.Len(t, first.Keys, first.Tokens/first.BlockTokens)
	require.Zero(t, first.Bytes)

	require.Equal(t, first, r.CacheKeys(parts(t, mooncake.Chat, strings.Replace(chat, "0.5", "0.7", 1))),
		"the temperature makes no other prompt")
	require.Len(t, e.asked(), 1)
	r.CacheKeys(parts(t, mooncake.Chat, strings.Replace(chat, "Hello", "Good evening", 1)))
	require.Len(t, e.asked(), 2)
	require.Equal(t, []float64{1, 2, 0}, r.outcomes())
}

// outcomes are how often token ids were known, asked for, and not told.
func (r *Reader) outcomes() (all []float64) {
	for _, outcome := range []string{tokenizeKnown, tokenizeAsked, tokenizeFailed} {
		all = append(all, testutil.ToFloat64(r.tokenizedPrompts.WithLabelValues(outcome)))
	}
	return all
}

// What stands in no text is looked up by what there is, and no engine is asked for a part of a
// prompt.
func TestAPromptThatIsNotAllTextIsNotTokenized(t *testing.T) {
	r, e := newReader(t, byEngine)
	const image = `{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}`
	shown := r.CacheKeys(parts(t, mooncake.Chat, `{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"What?"},`+image+`]}]}`))
	require.True(t, shown.Media)
	resumed := parts(t, mooncake.Completions, completion(long))
	resumed.Resumed = true
	got := r.CacheKeys(resumed)
	require.True(t, got.Media, "the answer so far is in no text")
	require.Len(t, got.Keys, 4)
	require.Empty(t, e.asked())
}

func TestAPromptThatNoEngineTokenizesIsKnownByItsBytes(t *testing.T) {
	for name, c := range map[string]struct {
		breaks func(*Reader, *tells, *Source)
		asked  int
	}{
		"there is no engine": {func(_ *Reader, _ *tells, s *Source) { s.Model.Name, s.Model.Board = "unknown", "unknown" }, 0},
		"it fails":           {func(_ *Reader, e *tells, _ *Source) { e.status = 500 }, 1},
		"it refuses":         {func(_ *Reader, e *tells, _ *Source) { e.status = 400 }, 1},
		"it takes too long": {func(r *Reader, e *tells, _ *Source) {
			r.Settings().Prefill.Index.TokenizeTimeout, e.slow = 100*time.Millisecond, true
		}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			r, e := newReader(t, byEngine)
			s := parts(t, mooncake.Completions, completion(long))
			c.breaks(r, e, s)
			got := r.CacheKeys(s)
			require.Len(t, got.Keys, 4)
			require.Zero(t, got.BlockTokens)
			require.Len(t, e.asked(), c.asked)
			require.Equal(t, []float64{0, 0, 1}, r.outcomes())
		})
	}
}

// Once an engine failed, the prompts that come next do not wait for another failure.
func TestPromptsDoNotAskWhereOneWasNotTold(t *testing.T) {
	r, e := newReader(t, byEngine)
	e.status = 500
	for n := range 5 {
		r.CacheKeys(parts(t, mooncake.Completions, completion(fmt.Sprint(n, long))))
	}
	require.Len(t, e.asked(), 1)
	require.Equal(t, []float64{0, 0, 5}, r.outcomes())
}

// Only a text can be gone on with, and one that the engine cuts would be cut again.
func TestWhichPromptsAnAnswerCanFollow(t *testing.T) {
	for body, want := range map[string]string{
		`{"model":"m","prompt":"a"}`:                                  `"a"`,
		`{"model":"m","prompt":"a","truncate_prompt_tokens":null}`:    `"a"`,
		`{"model":"m","prompt":"a","truncate_prompt_tokens":9}`:       "",
		`{"model":"m","prompt":[1,2]}`:                                "",
		`{"model":"m","prompt":["a","b"]}`:                            `"a"`,
		`{"model":"m","prompt":["a","b"],"truncate_prompt_tokens":9}`: "",
	} {
		require.Equal(t, want, string(parts(t, mooncake.Completions, body).Text()), body)
	}
}

func TestTheHashOfAPromptNeedsItsKey(t *testing.T) {
	hash := func(text, key string) uint64 {
		return parts(t, mooncake.Completions, completion(text)).Hash([]byte(key))
	}
	require.Equal(t, hash("a", "k"), hash("a", "k"))
	require.NotEqual(t, hash("a", "k"), hash("b", "k"))
	require.NotEqual(t, hash("a", "k"), hash("a", "another"))
}
