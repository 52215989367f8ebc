// Package admission handles a request of the public listener before it is served. It finds the
// route, checks the sender and the limits of its key, reads the request, and refuses it if no
// engine could serve it.
package admission

import (
	"cmp"
	"encoding/json"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/valyala/fasthttp"

	"evenkeel/gateway/edge"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/owner"
	"evenkeel/gateway/passthrough"
	"evenkeel/gateway/prompt"
	"evenkeel/gateway/request"
	"evenkeel/mooncake"
)

// New makes the Handler of a proxy's public listener.
func New(deps Deps) *Handler {
	d := &Handler{deps: deps}
	d.soleModel, d.routes = d.soleModelAnywhere, d.publicRoutes()
	return d
}

// Handle serves a request of the public listener: it finds the route of the path, or answers with
// an error if there is none.
func (d *Handler) Handle(ctx *fasthttp.RequestCtx) {
	path, method := string(ctx.Path()), string(ctx.Method())
	originAllowed := d.allowOrigin(ctx)
	route, ok := d.routes[path]
	if name, isModel := strings.CutPrefix(path, "/v1/models/"); isModel && name != "" { // a model's name may have slashes
		route, ok = d.routes[oneModelPath]
	}
	takesMethod := method == route.method || method == http.MethodHead && route.method == http.MethodGet
	switch {
	case !ok:
		d.deps.Requests.Fail(ctx, openai.NewError(http.StatusNotFound, "not_found", "no such path: "+method+" "+path))
	case originAllowed && isPreflight(&ctx.Request.Header):
		preflight(ctx, route.method)
	case !takesMethod:
		ctx.Response.Header.Set("Allow", route.method)
		d.deps.Requests.Fail(ctx, openai.NewError(http.StatusMethodNotAllowed, "method_not_allowed", path+" takes "+route.method+", not "+method))
	default:
		route.serve(ctx)
	}
}

// oneModelPath is the key of the route for all paths that name one model.
const oneModelPath = "/v1/models/{model}"

// publicRoutes returns the routes of the public listener, by path. Requests for answers of a model
// are split into prefill and decode (serveSplit). Those to the paths of package passthrough go to
// one engine unchanged.
func (d *Handler) publicRoutes() map[string]publicRoute {
	all := map[string]publicRoute{
		"/v1/chat/completions":   {http.MethodPost, func(ctx *fasthttp.RequestCtx) { d.serveSplit(ctx, mooncake.Chat) }},
		"/v1/completions":        {http.MethodPost, func(ctx *fasthttp.RequestCtx) { d.serveSplit(ctx, mooncake.Completions) }},
		"/v1/responses":          {http.MethodPost, func(ctx *fasthttp.RequestCtx) { d.serveSplit(ctx, mooncake.Responses) }},
		"/v1/messages":           {http.MethodPost, func(ctx *fasthttp.RequestCtx) { d.serveSplit(ctx, mooncake.Messages) }},
		"/inference/v1/generate": {http.MethodPost, func(ctx *fasthttp.RequestCtx) { d.serveSplit(ctx, mooncake.Tokens) }},
		"/generate":              {http.MethodPost, func(ctx *fasthttp.RequestCtx) { d.serveSplit(ctx, mooncake.Generate) }},
		openai.AbortGeneratePath: {http.MethodPost, d.abort},
		openai.AbortTokensPath:   {http.MethodPost, d.abort},
		"/v1/models":             {http.MethodGet, d.listModels},
		oneModelPath:             {http.MethodGet, d.showModel},
		"/health":                {http.MethodGet, d.health},
		"/healthcheck":           {http.MethodGet, d.healthcheck},
		metricsPath:              {http.MethodGet, d.metrics},
	}
	for _, path := range passthrough.Paths {
		all[path] = publicRoute{http.MethodPost, func(ctx *fasthttp.RequestCtx) { d.passThrough(ctx, path) }}
	}
	return all
}

// Routes lists the routes of the public listener, each with its method, such as GET /health.
func (d *Handler) Routes() (all []string) {
	for path, r := range d.routes {
		all = append(all, r.method+" "+path)
	}
	return all
}

// Limits returns the limits on what a client's request may ask for.
func (d *Handler) Limits() openai.Limits {
	limits := d.deps.Config.Settings().Accept
	limits.OnlyModel = d.soleModel
	return limits
}

// soleModelAnywhere returns the only model that this region and all other regions serve. It is
// empty if they serve several models, or none.
func (d *Handler) soleModelAnywhere() string {
	var offered []string
	if peers := d.deps.Requests.Peers; peers != nil {
		offered = peers.Models()
	}
	return d.deps.Fleet.Now().SoleModel(offered)
}

// serveSplit serves a request of an endpoint whose requests are split into prefill and decode.
func (d *Handler) serveSplit(ctx *fasthttp.RequestCtx, ep mooncake.Endpoint) {
	d.receive(ctx, ep.Path(), func(in *requestContext) *openai.Error { return d.admitAndServe(ctx, ep, in) })
}

// receive serves a request of a client by the function serve, after it has checked the sender. An
// error of serve becomes the answer. The answer has the client's X-Request-Id or, without one, the
// id that evenkeel gave the request.
func (d *Handler) receive(ctx *fasthttp.RequestCtx, path string, serve func(*requestContext) *openai.Error) {
	arrival := time.Now()
	clientID := string(ctx.Request.Header.Peek("X-Request-Id"))
	in := d.newIncoming(journal.LogEntry{ID: request.NewID(), ClientID: clientID, Arrival: arrival})
	ctx.Response.Header.Set("X-Request-Id", cmp.Or(clientID, in.Record.ID))
	d.serveOrRefuse(ctx, in, func() *openai.Error {
		if fail := d.checkSender(ctx, path, in); fail != nil {
			return fail
		}
		return serve(in)
	})
}

// serveOrRefuse calls serve. If serve returns an error, the client gets that error as the answer.
// If serve panics, the request first gives back what it holds of its caller's limits. Package edge
// recovers the panic and answers the client. A client that does not read its answer keeps it in
// memory, so the request counts against the limits of its key until the answer is written.
func (d *Handler) serveOrRefuse(ctx *fasthttp.RequestCtx, in *requestContext, serve func() *openai.Error) {
	panicked := true
	defer func() {
		if panicked {
			d.deps.Requests.ConcludePanicked(in.Incoming)
		}
		if unwritten := edge.WholeOf(ctx); unwritten != nil {
			unwritten.OnWritten = in.letGo
			return
		}
		in.letGo()
	}()
	if fail := serve(); fail != nil {
		d.deps.Requests.Refuse(ctx, in.Incoming, fail)
	}
	panicked = false
}

// newIncoming begins the record of a request. The request counts against the limits of its caller's
// key: with the answers that it asks for, until it has ended and its answer is written, and with an
// estimate of its tokens, which its end replaces by the number that engines counted.
func (d *Handler) newIncoming(facts journal.LogEntry) *requestContext {
	in := &requestContext{Incoming: d.deps.Requests.BeginRequest(facts)}
	in.CorrectEstimate = in.end
	in.stillCounting.Store(2)
	return in
}

// checkSender finds the key of a request's sender, opens the request's receipt and spans, and
// counts the request against the rate limits of the key. It returns an error if the key is unknown
// or over its limits.
func (d *Handler) checkSender(ctx *fasthttp.RequestCtx, path string, in *requestContext) *openai.Error {
	key, fail := d.authenticate(ctx)
	if fail != nil {
		return fail
	}
	in.Record.Key = key.Name
	in.Record.OpenViews(headersOf(ctx), key.Trusted, path) // only a trusted caller decides whether the request is traced
	if key.Trusted {
		in.Explain, _ = strconv.ParseBool(string(ctx.Request.Header.Peek(explainHeader)))
	}
	return in.applyKey(ctx, key, d.deps.Config.Settings().GatewayAPI.Objectives, in.Record.Arrival)
}

// headersOf returns a function that reads a header of the request; its result is empty if the
// request has no such header.
func headersOf(ctx *fasthttp.RequestCtx) func(name string) string {
	return func(name string) string { return string(ctx.Request.Header.Peek(name)) }
}

// readBody reads a request's body and decompresses it, because neither evenkeel nor an engine can
// read compressed JSON. The memory of the body counts as reserved (in.Body) until the request gives
// it back.
func (d *Handler) readBody(ctx *fasthttp.RequestCtx, in *requestContext) ([]byte, *openai.Error) {
	packed, reservation := edge.AcquireBody(ctx)
	in.Body = reservation
	raw, refusal := edge.Unpack(&ctx.Request.Header, packed, reservation, d.deps.Config.Settings().Limits.Body)
	if refusal == nil {
		return raw, nil
	}
	fail := &openai.Error{Status: refusal.Status, Code: refusal.Code, Message: refusal.Message}
	switch refusal.Status {
	case http.StatusUnsupportedMediaType:
		ctx.Response.Header.Set("Accept-Encoding", edge.Encodings)
	case http.StatusServiceUnavailable: // other bodies may soon give their memory back
		fail.RetryAfter = 1
	}
	return nil, fail
}

// admitAndServe serves a request that is split into prefill and decode. The caller has checked the
// sender, which is a client or another proxy. If admitAndServe returns an error, nothing has been
// written to the client yet. The request counts against its caller's limits until it ends.
func (d *Handler) admitAndServe(ctx *fasthttp.RequestCtx, ep mooncake.Endpoint, in *requestContext) *openai.Error {
	from := in.From // the proxy that forwarded the request; nil: a client sent it
	in.Record.Report(journal.Event{Kind: journal.Parsing})
	req, route, fail := d.admit(ctx, ep, in)
	in.Record.Report(journal.Event{Kind: journal.Parsed, Req: req}) // also after an error, because the event Parsed ends the time of parsing
	if from != nil && fail == nil {
		// The other proxy may send the request elsewhere, but a client's request waits here if it must.
		fail = d.checkBusy(from, route)
	}
	if fail != nil {
		return fail
	}
	if fail := d.readRoutingHeaders(ctx, in, route, &req.Body); fail != nil {
		return fail
	}
	in.readLocality(ctx, d.deps.Requests.Peers != nil) // where the client is, and whether its request must stay in this region
	parts := req.Parts()
	if fail := d.deps.Requests.Prompts.CheckBeforePrefill(route, req, parts); fail != nil {
		return fail
	}
	if fail := in.countAnswers(len(parts) - 1); fail != nil { // applyKey has counted the first answer
		return fail
	}
	if fail := in.chargePrompt(prompt.AllTokens(req, parts), in.Record.Arrival); fail != nil {
		return fail
	}
	return d.deps.Requests.Serve(ctx, in.Incoming, req, route, parts)
}

// admit reads a request. It returns an error if the request is malformed, or if neither an engine
// here nor another region can serve it now. The returned request is nil if it could not be read.
func (d *Handler) admit(ctx *fasthttp.RequestCtx, ep mooncake.Endpoint, in *requestContext) (*openai.Request, roster.Route, *openai.Error) {
	if fail := d.checkShutdown(ctx, in); fail != nil {
		return nil, roster.Route{}, fail
	}
	raw, fail := d.readBody(ctx, in)
	if fail != nil {
		return nil, roster.Route{}, fail
	}
	req, fail := openai.Parse(ep, raw, d.Limits())
	if fail != nil {
		return nil, roster.Route{}, fail
	}
	engines := d.deps.Fleet.Now() // read once, so that all checks below see the same engines
	route, listed, modelsKnown := engines.Lookup(req.Model)
	servesModel := listed && !route.OneSided // OneSided: only engines that prefill, or only engines that decode, list the model
	here := lookup{engines: engines, servesModel: servesModel, modelsKnown: modelsKnown}
	if !ep.IsChatOrCompletions() {
		if fail := d.checkEndpoint(ep, req.Model, route); fail != nil {
			return req, route, fail
		}
		in.NoHandOff = route.NoHandOff[ep] // true: an engine takes no hand-off at ep, so a decode rank must compute the prompt
	}
	if fail := d.checkForEngines(req, route, servesModel); fail != nil {
		return req, route, fail
	}
	otherRegionServes, fail := d.otherRegionServes(ep, in, req.Model, servesModel)
	switch {
	case fail != nil:
		return req, route, fail
	case otherRegionServes && !servesModel: // the request will be forwarded, for which its route only needs the name of the model
		return req, roster.Route{Name: req.Model, Board: req.Model}, nil
	case otherRegionServes: // later the geo policy chooses between the engines here and another region
		return req, route, nil
	}
	return req, route, d.checkServed(ep, in, req.Model, route, here)
}

// checkForEngines returns an error if the request asks for what its model's engines do not support:
// because they are SGLang's, or because they split it into prefill and decode. servesModel says
// that engines of this region can serve the model; else nothing is split here.
func (d *Handler) checkForEngines(req *openai.Request, route roster.Route, servesModel bool) *openai.Error {
	if route.SGLang {
		if fail := req.CheckForSGLang(d.deps.Config.Settings().Accept.VocabSize); fail != nil {
			return fail
		}
	}
	if !servesModel || route.AllAggregated { // engines that both prefill and decode need no split
		return nil
	}
	if fail := req.CheckSplit(route.PromptLogprobs); fail != nil {
		return fail
	}
	// PrefillOnly (set by CheckSplit): a prefill engine alone would answer the request, with the
	// logprobs of its prompt. But SGLang's server exits when it gets a request without a bootstrap
	// room.
	if route.SGLang && req.PrefillOnly {
		return errNoPromptLogprobs
	}
	return nil
}

// otherRegionServes says whether another region to which the request may go serves its model now.
// It returns an error if this region does not serve the model (servedHere), and only the rules of
// residency keep the request from a region that does.
func (d *Handler) otherRegionServes(ep mooncake.Endpoint, in *requestContext, model string, servedHere bool) (bool, *openai.Error) {
	peers := d.deps.Requests.Peers
	// Requests to other endpoints are never forwarded, and a forwarded request was sent for the
	// engines of this region.
	mayLeave := ep.IsChatOrCompletions() && in.From == nil
	switch {
	case peers == nil || !mayLeave:
		return false, nil
	case peers.OfferedTo(in.Record.Key, model):
		return true, nil
	case !servedHere && peers.Offered(model):
		return false, openai.NewError(http.StatusForbidden, "residency_forbids",
			"no region to which this request may go serves "+strconv.Quote(model)+
				"; use another key or model, or ask the operator to change geo.residency")
	}
	return false, nil
}

// lookup says what is known of the model of a request in this region.
type lookup struct {
	engines     *roster.Snapshot
	servesModel bool // engines for prefill and for decode list the model, and not only those of one side
	modelsKnown bool // engines have reported their models; false: an engine may still report this model
}

// checkServed returns an error if the engines of this region cannot serve a request that stays
// here. The error says whether a retry may help.
func (d *Handler) checkServed(ep mooncake.Endpoint, in *requestContext, model string, route roster.Route, here lookup) *openai.Error {
	if d.regionMayServeSoon(here) {
		return openai.Unavailable("no_region_available",
			"no engine of this proxy serves "+strconv.Quote(model)+", and no region that can be reached does", 1)
	}
	switch {
	case !here.servesModel && here.modelsKnown:
		return failure.NoSuchModel(model)
	case !(route.Prefill && route.Decode) && here.engines.IncompleteGroup(model) != "":
		return failure.Incomplete(here.engines.IncompleteGroup(model), model)
	case !here.servesModel || !route.Prefill: // no engine has reported its models yet, or no engine that prefills this model is up
		return failure.Unserved("prefill", model, route.AllAggregated, here.engines.EngineStates(model, false))
	case !route.Decode:
		return failure.Unserved("decode", model, route.AllAggregated, here.engines.EngineStates(model, true))
	// Only chats and completions can be forwarded to the proxy that owns a decode group of the model.
	// For other requests this proxy needs a group of its own, because otherwise none of its ranks
	// could decode them.
	case !ep.IsChatOrCompletions() && !here.engines.OwnsGroupFor(route.Board, route.Name):
		return failure.NotOurs
	case in.NoHandOff && !d.deps.Requests.LocalRanks.AnyComputes(route.Board): // 404, not 503: a retry would fail for the same reason
		return openai.NewError(http.StatusNotFound, "no_such_route",
			"an engine of "+strconv.Quote(model)+" takes no hand-off at "+
				ep.Path()+
				", and no decode engine may compute a prompt alone; use /v1/chat/completions, or ask the operator for allow_local_prefill")
	}
	return nil
}

// regionMayServeSoon says whether no region can serve the request now, but one may do so soon, so
// that the client is asked to retry. It is false if there are no other regions.
func (d *Handler) regionMayServeSoon(here lookup) bool {
	peers := d.deps.Requests.Peers
	if peers == nil {
		return false
	}
	if here.servesModel {
		// If regions have owners, only the owner of a region sends requests to its engines. This proxy
		// may soon own one.
		return d.deps.Requests.Owner.Has(owner.Regions) && !d.deps.Requests.Owner.AdmitsAny()
	}
	// Another region may have the model if it is down now, and this one as long as its engines have
	// not reported their models.
	return !here.modelsKnown || !peers.AllUp()
}

// checkEndpoint returns an error if an endpoint other than those for chats and completions is not
// served for a model. Requests of such an endpoint stay in this region, and not every engine has
// the endpoint. Nor is it served if a decode engine without KV memory may give a request back,
// which means that it ends the answer early: at these endpoints the answer would not show that it
// is incomplete.
func (d *Handler) checkEndpoint(ep mooncake.Endpoint, model string, route roster.Route) *openai.Error {
	if fail := d.checkServedHere(ep.Path(), model); fail != nil {
		return fail
	}
	if route.GivesBackUnseen {
		return openai.NewError(http.StatusNotFound, "no_such_route", ep.Path()+" is not served for "+strconv.Quote(model)+mayEndUnseen)
	}
	return checkEnginesServe(ep, route)
}

// errNoPromptLogprobs refuses the logprobs of a prompt: SGLang does not return them if prefill and
// decode run on two engines.
var errNoPromptLogprobs = &openai.Error{
	Status: http.StatusBadRequest, Code: openai.CodeUnsupported, Param: "echo",
	Message: "\"echo\" with \"logprobs\" is not supported here: the engines of this model either prefill or decode, and tell no logprobs of " +
		"a prompt then",
}

// mayEndUnseen is the error text if an answer could end early without any sign of it in the answer.
const mayEndUnseen = ": this model has decode engines of vllm-ascend, which may end an answer early when they have no memory left, and " +
	"this endpoint would not say so; " +
	"use /v1/chat/completions, or ask the operator whether the connector of the engines is right, and for gives_back: false"

// checkEnginesServe returns an error if the engines of the request's model do not serve the
// endpoint, or would answer with another model;
// nil: the endpoint is served. Chats and completions do not come here.
func checkEnginesServe(ep mooncake.Endpoint, route roster.Route) *openai.Error {
	why := ""
	switch {
	case !route.SGLang && ep == mooncake.Generate: // the endpoint is SGLang's own
		why = "its engines take token ids at " + mooncake.Tokens.Path()
	case !route.SGLang: // other engines than SGLang serve all other endpoints
		return nil
	case ep == mooncake.Tokens:
		why = "its engines take token ids at " + mooncake.Generate.Path()
	case ep == mooncake.Responses && route.Adapter != "": // 0.5.23, create_responses in entrypoints/openai/serving_responses.py
		return noAdapterOfSGLang(ep.Path(), route.Name)
	case route.NoHandOff[ep]: // an older SGLang cannot hand a prefill over to a decode engine at this endpoint
		why = "it needs SGLang 0.5.23 or later, and an engine of this model is older, or does not tell its version at /server_info; use " +
			"/v1/chat/completions"
	default:
		return nil
	}
	return openai.NewError(http.StatusNotFound, "no_such_route", ep.Path()+" is not served for "+strconv.Quote(route.Name)+": "+why)
}

// noAdapterOfSGLang is the error for an endpoint at which SGLang has no LoRA adapters, or gets the
// request unchanged.
func noAdapterOfSGLang(path, model string) *openai.Error {
	return openai.NewError(http.StatusNotFound, "no_such_route", path+" is not served for "+strconv.Quote(model)+
		": engines of SGLang would answer there with the base model in place of this LoRA adapter")
}

// checkShutdown returns an error while the proxy shuts down. Until it has handed over its engines
// to another proxy, it still takes requests that other proxies forward. As soon as the proxy
// drains, checkShutdown also closes the connection after the answer.
func (d *Handler) checkShutdown(ctx *fasthttp.RequestCtx, in *requestContext) *openai.Error {
	if d.deps.Service.Draining() {
		ctx.SetConnectionClose() // so that the client opens a new connection, which the load balancer sends to another proxy
	}
	takesForwarded := in.From != nil && d.deps.Requests.Owner.HandingOver()
	if d.deps.Service.Refusing() && !takesForwarded {
		return failure.Leaving
	}
	return nil
}

// CountRefused counts a request that was refused before a handler saw it. The request also counts
// for the requests per minute of its key, if the key is known.
func (d *Handler) CountRefused(h *fasthttp.RequestHeader, r edge.Refusal) {
	if key, ok := d.keyOf(h); ok {
		key.TakeRequest(time.Now()) // the request is refused anyway, so it does not matter whether the key has requests left
	}
	d.deps.Requests.Journal.CountRefused(&openai.Error{Status: r.Status, Code: r.Code})
}

// AnswerRefused answers a request that was refused before a handler saw it, in the form of its
// endpoint.
func (d *Handler) AnswerRefused(ctx *fasthttp.RequestCtx, r edge.Refusal) {
	edge.AnswerJSON(ctx, r)
	d.allowOrigin(ctx)
	if path := string(ctx.Path()); openai.IsAnthropicPath(path) {
		ctx.SetBody((&openai.Error{Status: r.Status, Code: r.Code, Message: r.Message}).BodyFor(path))
	}
}

// servedModel is a model in the form of OpenAI, followed by the fields that Anthropic's clients
// read.
type servedModel struct {
	ID          string `json:"id"`
	Object      string `json:"object"`
	Created     int64  `json:"created"`
	OwnedBy     string `json:"owned_by"`
	Root        string `json:"root"`
	MaxModelLen int    `json:"max_model_len,omitempty"`

	Type        string `json:"type"`
	DisplayName string `json:"display_name"`
	CreatedAt   string `json:"created_at"`
	Lifecycle   string `json:"lifecycle"`
	MaxInput    int    `json:"max_input_tokens,omitempty"`
}

// newServedModel describes a model. Its creation time is not known, so the time of the proxy's
// start is given.
func (d *Handler) newServedModel(name, root string, maxLen int) servedModel {
	return servedModel{
		ID: name, Object: "model", Created: d.deps.Started.Unix(), OwnedBy: "evenkeel", Root: root, MaxModelLen: maxLen,
		Type: "model", DisplayName: name, CreatedAt: d.deps.Started.UTC().Format(time.RFC3339), Lifecycle: "active", MaxInput: maxLen,
	}
}

// listModels answers with the list of servedModels.
func (d *Handler) listModels(ctx *fasthttp.RequestCtx) {
	if !d.admitModelsCaller(ctx) {
		return
	}
	list := d.servedModels()
	page := struct {
		Object  string        `json:"object"`
		Data    []servedModel `json:"data"`
		HasMore bool          `json:"has_more"` // HasMore, FirstID and LastID are Anthropic's fields for pages; the list has only one page
		FirstID *string       `json:"first_id"`
		LastID  *string       `json:"last_id"`
	}{Object: "list", Data: list}
	if len(list) > 0 {
		page.FirstID, page.LastID = &list[0].ID, &list[len(list)-1].ID
	}
	d.writeJSON(ctx, http.StatusOK, page)
}

// showModel answers with the one model of servedModels that the path names.
func (d *Handler) showModel(ctx *fasthttp.RequestCtx) {
	if !d.admitModelsCaller(ctx) {
		return
	}
	name := strings.TrimPrefix(string(ctx.Path()), "/v1/models/")
	list := d.servedModels()
	i := slices.IndexFunc(list, func(m servedModel) bool { return m.ID == name })
	if i < 0 {
		d.deps.Requests.Fail(ctx, failure.NoSuchModel(name))
		return
	}
	d.writeJSON(ctx, http.StatusOK, list[i])
}

// admitModelsCaller counts a request for the list of models. admitted is false if the caller is
// unknown or over its rate; then admitModelsCaller has answered the request with the error.
func (d *Handler) admitModelsCaller(ctx *fasthttp.RequestCtx) (admitted bool) {
	key, fail := d.authenticate(ctx)
	if fail == nil {
		fail = countRequest(key, time.Now())
	}
	if fail != nil {
		d.deps.Requests.Journal.CountRefused(fail)
		d.deps.Requests.Fail(ctx, fail)
	}
	return fail == nil
}

// servedModels returns the models that healthy engines serve, here and in other regions. The
// context lengths of models in other regions are not known.
func (d *Handler) servedModels() []servedModel {
	list := []servedModel{}
	for _, r := range d.deps.Fleet.Now().Models() {
		list = append(list, d.newServedModel(r.Name, r.Board, r.MaxLen))
	}
	if d.deps.Requests.Peers != nil {
		for _, name := range d.deps.Requests.Peers.Models() {
			if !slices.ContainsFunc(list, func(m servedModel) bool { return m.ID == name }) {
				list = append(list, d.newServedModel(name, name, 0)) // 0: the length is unknown
			}
		}
	}
	return list
}

// health answers as the engines do: 200 while requests can be served, otherwise 503.
func (d *Handler) health(ctx *fasthttp.RequestCtx) {
	if ok, _ := d.deps.Ready(); !ok {
		ctx.SetStatusCode(http.StatusServiceUnavailable)
	}
}

// healthcheck answers in the form of vllm-ascend's proxy: whether requests can be served, and how
// many engines there are.
func (d *Handler) healthcheck(ctx *fasthttp.RequestCtx) {
	prefillers, decoders := d.deps.Fleet.Now().CountKnown()
	ok, _ := d.deps.Ready()
	status, word := http.StatusOK, "ok"
	if !ok {
		status, word = http.StatusServiceUnavailable, "unavailable"
	}
	d.writeJSON(ctx, status, map[string]any{"status": word, "prefill_instances": prefillers, "decode_instances": decoders})
}

// writeJSON answers with v as JSON, or with 500 if v cannot be encoded.
func (d *Handler) writeJSON(ctx *fasthttp.RequestCtx, status int, v any) {
	body, err := json.Marshal(v)
	if err != nil {
		ctx.SetStatusCode(http.StatusInternalServerError)
		return
	}
	ctx.SetStatusCode(status)
	d.writePage(ctx, "application/json", body)
}

// passThrough serves a request that is passed through to one engine unchanged.
func (d *Handler) passThrough(ctx *fasthttp.RequestCtx, path string) {
	d.receive(ctx, path, func(in *requestContext) *openai.Error {
		in.Record.Report(journal.Event{Kind: journal.Parsing})
		req, raw, fail := d.admitPassedThrough(ctx, path, in)
		in.Record.Report(journal.Event{Kind: journal.Parsed, Req: req}) // also after an error, because the event Parsed ends the time of parsing
		if fail != nil {
			return fail
		}
		if fail := in.chargePrompt(passthrough.Estimate(path, req), in.Record.Arrival); fail != nil {
			return fail
		}
		return d.deps.Through.Serve(ctx, in.Incoming, req, path, raw)
	})
}

// admitPassedThrough reads a request that is passed through, and refuses it if it is malformed or
// if no engine of this region has its model. It returns the request and its body.
func (d *Handler) admitPassedThrough(ctx *fasthttp.RequestCtx, path string, in *requestContext) (*openai.Request, []byte, *openai.Error) {
	if fail := d.checkShutdown(ctx, in); fail != nil {
		return nil, nil, fail
	}
	raw, fail := d.readBody(ctx, in)
	if fail != nil {
		return nil, nil, fail
	}
	req, fail := passthrough.Parse(path, raw, string(ctx.Request.Header.ContentType()), d.Limits())
	if fail != nil {
		return nil, nil, fail
	}
	fail = d.checkServedHere(path, req.Model)
	route, _, _ := d.deps.Fleet.Now().Lookup(req.Model)
	if fail == nil && passthrough.RunsModel(path) && route.SGLang && route.Adapter != "" {
		fail = noAdapterOfSGLang(path, req.Model)
	}
	return req, raw, fail // with the request also after an error, so that its receipt names the model
}

// checkServedHere returns an error if no engine of this region has the model. It is for endpoints
// whose requests are not forwarded to other regions. Until the engines have reported their models,
// it returns nil.
func (d *Handler) checkServedHere(path, model string) *openai.Error {
	_, listed, modelsKnown := d.deps.Fleet.Now().Lookup(model)
	switch {
	case listed: // an engine of this region has the model
	case d.deps.Requests.Peers != nil && d.deps.Requests.Peers.Offered(model):
		return openai.Unavailable("no_region_available", "no engine of this region serves "+strconv.Quote(model)+", and requests to "+path+
			" are not sent to other regions; send it to a proxy there", 1)
	case modelsKnown:
		return failure.NoSuchModel(model)
	}
	return nil
}
