package gateway

import (
	"fmt"
	"net/http"
	"strconv"
	"sync"

	"github.com/cespare/xxhash/v2"
	"github.com/valyala/fasthttp"

	"evenkeel/gateway/fleet"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/openai"
	"evenkeel/mooncake"
	"evenkeel/prefill"
	"evenkeel/prefill/index"
)

// A recognizer turns prompts into what the prefix index knows them by.
type recognizer struct {
	hashers sync.Pool // of *index.Hasher: a prompt is hashed outside of every lock
	mu      sync.Mutex
	salts   index.Salts
}

// hashPrompt hashes a job's prompt. One that no other will ever share has no keys:
// its salt was made for it alone, or it is several prompts.
func (g *Gateway) hashPrompt(j *job) prefill.Prompt {
	r, size := &g.recognizer, g.conf().Prefill.Index.BlockBytes
	body := &j.body
	scope := index.Scope{Model: j.model.Board}
	if j.model.Name != j.model.Board {
		scope.LoRA = j.model.Name
	}
	if salt, ok := body.Get("cache_salt"); ok {
		scope.Salt = string(salt)
		r.mu.Lock()
		shared := r.salts.Shared(scope.Salt)
		r.mu.Unlock()
		if !shared {
			return prefill.Prompt{}
		}
	}
	h, _ := r.hashers.Get().(*index.Hasher)
	if h == nil {
		h = new(index.Hasher)
	}
	h.BlockBytes = size
	defer r.hashers.Put(h)
	ids, bytes := g.tier.BlockTokens(j.model.Name), scope.Root(index.Bytes, size)
	tokens := scope.Root(index.Tokens, ids)
	salted := scope.Salt != ""
	var text index.Text
	if j.req.Endpoint == mooncake.Completions {
		written, _ := body.Get("prompt")
		if j.leg != nil && j.leg.Prompt != nil {
			written = j.leg.Prompt
		}
		if list, ok := index.PromptTokens(nil, written); ok {
			return prefill.Prompt{Keys: h.Tokens(nil, tokens, list, ids), BlockTokens: ids, Tokens: len(list), Salted: salted}
		}
		text = h.Prompt(nil, bytes, written)
	} else {
		messages, _ := body.Get("messages")
		listed, _ := body.Get("tools")
		text = h.Chat(nil, bytes, messages, listed)
	}
	if g.conf().Prefill.Index.Tokenize == prefill.TokenizeEngine && !text.Media && j.resume.times == 0 && text.Bytes > 0 {
		if keys, n, ok := g.tokenize(j, h, tokens, ids); ok {
			return prefill.Prompt{Keys: keys, BlockTokens: ids, Tokens: n, Salted: salted}
		}
	}
	// What a resumed answer adds to the prompt is not in its text.
	return prefill.Prompt{Keys: text.Keys, Bytes: text.Bytes, BlockBytes: size, Salted: salted, Media: text.Media || j.resume.times > 0}
}

// Headers of a request that steer it, and of an answer that say where it went.
const (
	sessionHeader  = "X-Evenkeel-Session"
	policyHeader   = "X-Evenkeel-Policy"
	prefillHeader  = "X-Evenkeel-Prefill"
	hitHeader      = "X-Evenkeel-Hit-Tokens"
	attemptsHeader = "X-Evenkeel-Attempts"
	routeHeader    = "X-Evenkeel-Route"
	reasonHeader   = "X-Evenkeel-Reason"
	decodeHeader   = "X-Evenkeel-Decode"
	waitsHeader    = "X-Evenkeel-Waits"
	explainHeader  = "X-Evenkeel-Explain"

	disaggregateHeader  = "X-Evenkeel-Disaggregate"
	targetPrefillHeader = "X-Evenkeel-Target-Prefill"
	targetDecodeHeader  = "X-Evenkeel-Target-Decode"
	geoHeader           = "X-Evenkeel-Geo"
)

// incoming is a request as it came, and what is told of it.
type incoming struct {
	told *journal.Request
	caller
	wishes
	from *hop   // how it came from another dispatcher; nil: from a client
	way  string // where it was served, as routeHeader names it; empty: nowhere
}

// wishes are what a request asks for besides its body. Only a trusted caller is
// heard on anything but the session and where the request stays.
type wishes struct {
	explain       bool   // answer headers name engine, policy and reason
	stays         bool   // X-Evenkeel-Geo: local, which says: never forward
	session       uint64 // hash of its name; 0: none
	prefillPolicy string // the policy that chooses its prefill engine; empty: the default
	disaggregate  string
	toPrefill     string  // the candidate that has to prefill; empty: any
	toDecode      []int32 // the decode rank that has to decode; nil: any
}

// steer reads what a request says about its way: its session, which anybody may
// name, and the prefill policy and the engines, which only a trusted caller may.
func (g *Gateway) steer(ctx *fasthttp.RequestCtx, in *incoming, m fleet.Route, body *mooncake.Body) *openai.Error {
	session := ctx.Request.Header.Peek(sessionHeader)
	for _, key := range [...]string{"prompt_cache_key", "user"} {
		if value, ok := body.Get(key); ok && len(session) == 0 && len(value) > 2 && value[0] == '"' {
			session = value
		}
	}
	if len(session) > 0 {
		var d xxhash.Digest
		d.Reset()
		_, _ = d.WriteString(in.told.Key) // the same name of another caller is another session
		_, _ = d.Write([]byte{0})
		_, _ = d.Write(session)
		in.session = max(1, d.Sum64())
	}
	if said := ctx.Request.Header.Peek(disaggregateHeader); len(said) > 0 && in.key.Trusted {
		in.disaggregate = string(said)
		if fail := checkDisaggregate(in.disaggregate); fail != nil {
			return fail
		}
	}
	if spec := ctx.Request.Header.Peek(policyHeader); len(spec) > 0 && in.key.Trusted {
		in.prefillPolicy = string(spec)
		if err := g.tier.CheckPolicy(in.prefillPolicy); err != nil {
			return openai.NewError(http.StatusBadRequest, "bad_policy", err.Error()+"; or leave "+policyHeader+" out")
		}
	}
	return g.aim(ctx, in, m)
}

// aimed says whether a trusted caller named an engine.
func (w *wishes) aimed() bool { return w.toPrefill != "" || w.toDecode != nil }

// aim reads which engines a trusted caller wants.
func (g *Gateway) aim(ctx *fasthttp.RequestCtx, in *incoming, m fleet.Route) *openai.Error {
	if id := ctx.Request.Header.Peek(targetPrefillHeader); len(id) > 0 && in.key.Trusted {
		in.toPrefill = string(id)
		if err := g.tier.CheckTarget(m.Name, in.toPrefill); err != nil {
			return openai.NewError(http.StatusBadRequest, "bad_target", err.Error()+"; or leave "+targetPrefillHeader+" out")
		}
	}
	if name := ctx.Request.Header.Peek(targetDecodeHeader); len(name) > 0 && in.key.Trusted {
		worker, ok := g.fleet.RankOf(string(name), m.Board)
		if !ok {
			return openai.NewError(http.StatusBadRequest, "bad_target",
				strconv.Quote(string(name))+" is no decode rank for the model; GET /workers lists them; or leave "+targetDecodeHeader+" out")
		}
		in.toDecode = []int32{worker}
	}
	return nil
}

// locate reads where a request comes from and whether it may leave.
func (r *incoming) locate(ctx *fasthttp.RequestCtx) {
	r.address = ctx.RemoteIP().String()
	r.stays = string(ctx.Request.Header.Peek(geoHeader)) == "local"
	r.way = wayLocal
}

// exposes says whether the caller may see which way the request went: names of
// engines are addresses.
func (g *Gateway) exposes(in *incoming) bool { return g.conf().ExposeRoute || in.explain }

// expose says in an answer's headers which way the request went, and what it
// waited for up to its first event, as a Server-Timing header would.
func (g *Gateway) expose(ctx *fasthttp.RequestCtx, in *incoming) {
	told := in.told
	if !g.exposes(in) || told.Route == "" {
		return
	}
	h := &ctx.Response.Header
	h.Set(decodeHeader, told.Rank)
	h.Set(waitsHeader, fmt.Sprintf("queue;dur=%.1f, probe;dur=%.1f, pool;dur=%.1f, transfer;dur=%.1f", told.QueueMs, told.ProbeMs, told.WaitMs, told.TransferMs))
	if told.Route == journal.Disaggregated {
		h.Set(prefillHeader, told.Prefill)
		h.Set(policyHeader, told.PrefillPolicy)
	}
	h.Set(hitHeader, strconv.Itoa(told.HitTokens))
	h.Set(attemptsHeader, strconv.Itoa(told.Attempts))
	h.Set(routeHeader, told.Route)
}
