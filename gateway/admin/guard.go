package admin

import (
	"encoding/json"
	"mime"
	"net"
	"net/http"
	"strings"

	"go.uber.org/zap"

	"evenkeel/gateway"
	"evenkeel/gateway/config"
	"evenkeel/gateway/openai"
)

// guard calls next only for requests that an operator meant to send: they have the token, if one is
// set, and no browser sent them for the page of another site. It answers all other requests with an
// error. Health routes are not guarded, because kubelets have no token.
func (h *handler) guard(next http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		known, tokenRequired := h.g.Reloader().CheckToken(bearer(r))
		if !known {
			w.Header().Set("WWW-Authenticate", "Bearer")
			fail(w, http.StatusUnauthorized, "invalid_token", "send Authorization: Bearer TOKEN, with the token of admin.token_file")
			return
		}
		if !tokenRequired && !isLoopback(r.Host) {
			fail(w, http.StatusForbidden, "wrong_host", "without a token this listener answers to localhost and loopback addresses only, else any "+
				"web page could have a name that leads here; use one, or set admin.token_file")
			return
		}
		if crossSite(r) {
			fail(w, http.StatusForbidden, "cross_site",
				"a browser sent this on behalf of a page of another site; open the admin listener itself, or use curl")
			return
		}
		onlyReads := r.Method == http.MethodGet || r.Method == http.MethodHead
		hasBody := r.ContentLength != 0 // -1: a body of unknown length
		if hasBody && !onlyReads && !isJSON(r) {
			fail(w, http.StatusUnsupportedMediaType, "wrong_content_type", "send the body with Content-Type: application/json")
			return
		}
		r.Body = http.MaxBytesReader(w, r.Body, maxBody)
		forbidEmbedding(w.Header())
		next(w, r)
	}
}

// bearer returns the token of a request; empty: the request has no token.
func bearer(r *http.Request) string {
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return ""
	}
	return token
}

// isLoopback says whether a Host header has a loopback name or address. An attacker can make any
// other name resolve to this machine (DNS rebinding), and a browser then treats the attacker's page
// and this listener as one site.
func isLoopback(host string) bool {
	bracketed := strings.HasPrefix(host, "[")
	if name, _, err := net.SplitHostPort(host); err == nil { // SplitHostPort also takes the brackets off
		host = name
	} else if bracketed { // an IPv6 address without a port
		host = strings.TrimSuffix(host[1:], "]")
	}
	// RFC 3986: an IPv6 address has brackets, and nothing else has
	return config.Loopback(strings.ToLower(host)) && bracketed == strings.Contains(host, ":")
}

var origins = http.NewCrossOriginProtection()

// crossSite says whether a browser sent a request for the page of another site. Such requests are
// allowed only if a person followed a link to a page. Links to /debug are refused, too, because a
// profile costs a minute of CPU.
func crossSite(r *http.Request) bool {
	asPost := *r
	asPost.Method = http.MethodPost // because origins.Check lets every GET pass
	if origins.Check(&asPost) == nil {
		return false
	}
	onlyReads := r.Method == http.MethodGet || r.Method == http.MethodHead
	dest := r.Header.Get("Sec-Fetch-Dest")
	isWholePage := dest == "" || dest == "document" // if a page is loaded into a frame, dest has another value
	isLink := r.Header.Get("Origin") == "" && r.Header.Get("Sec-Fetch-Mode") == "navigate" && isWholePage
	return !onlyReads || !isLink || strings.HasPrefix(r.URL.Path, "/debug/")
}

// isJSON says whether the body is JSON. A page of another site may send forms and plain text
// without a preflight, but not JSON.
func isJSON(r *http.Request) bool {
	kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	return err == nil && kind == "application/json"
}

// maxBody bounds request bodies, in bytes. No call needs nearly as much.
const maxBody = 1 << 20

// forbidEmbedding sets headers that forbid browsers to show the answer to pages of other sites.
func forbidEmbedding(h http.Header) {
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("X-Frame-Options", "DENY")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
}

// fail answers a request with an error in the JSON form of OpenAI's API.
func fail(w http.ResponseWriter, status int, code, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(openai.NewError(status, code, message).JSON())
}

// handler answers the requests of operators to one proxy.
type handler struct {
	g   *gateway.Gateway
	log *zap.Logger
}

// reply answers a request with v as JSON.
func reply(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	_ = enc.Encode(v) // an error means that the operator closed the connection
}

// readJSON decodes a JSON body into v. If it cannot, it answers the request with 400, and ok is
// false.
func readJSON(w http.ResponseWriter, r *http.Request, v any) (ok bool) {
	dec := json.NewDecoder(r.Body)
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		fail(w, http.StatusBadRequest, "bad_body", "the body is not the JSON this takes: "+err.Error())
		return false
	}
	return true
}

// setPolicyFromBody puts the policy that the body names in force, and answers with this policy.
// what names the kind of policy in the log.
func (h *handler) setPolicyFromBody(w http.ResponseWriter, r *http.Request, what string, policies interface {
	Policy() string
	SetPolicy(text string) error
},
) {
	var in struct {
		Policy string `json:"policy"`
	}
	if !readJSON(w, r, &in) {
		return
	}
	before := policies.Policy()
	if err := policies.SetPolicy(in.Policy); err != nil {
		fail(w, http.StatusBadRequest, "bad_policy", err.Error())
		return
	}
	h.log.Info("an operator changed the "+what, zap.String("from", before), zap.String("to", policies.Policy()))
	reply(w, map[string]string{"policy": policies.Policy()})
}
