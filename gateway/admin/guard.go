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

// guard lets a request through that an operator meant to send: with the token,
// where there is one, and not sent by a browser on behalf of a page elsewhere.
// Health is not guarded: kubelets have neither.
func (h *handler) guard(next http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		known, asked := h.g.Reloader().Operator(bearer(r))
		if !known {
			w.Header().Set("WWW-Authenticate", "Bearer")
			fail(w, http.StatusUnauthorized, "invalid_token", "send Authorization: Bearer TOKEN, with the token of admin.token_file")
			return
		}
		if !asked && !here(r.Host) {
			fail(w, http.StatusForbidden, "wrong_host", "without a token this listener answers to localhost and loopback addresses only, else any "+
				"web page could have a name that leads here; use one, or set admin.token_file")
			return
		}
		if crossSite(r) {
			fail(w, http.StatusForbidden, "cross_site",
				"a browser sent this on behalf of a page of another site; open the admin listener itself, or use curl")
			return
		}
		if r.ContentLength != 0 && r.Method != http.MethodGet && r.Method != http.MethodHead && !isJSON(r) {
			fail(w, http.StatusUnsupportedMediaType, "wrong_content_type", "send the body with Content-Type: application/json")
			return
		}
		r.Body = http.MaxBytesReader(w, r.Body, maxBody)
		keepToOurselves(w.Header())
		next(w, r)
	}
}

// bearer is the token of a request, empty without one.
func bearer(r *http.Request) string {
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return ""
	}
	return token
}

// here tells a loopback name or address from one that a page's owner made lead
// here (DNS rebinding): to the browser, page and listener are then one site.
func here(host string) bool {
	bracketed := strings.HasPrefix(host, "[")
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	} else if bracketed {
		host = strings.TrimSuffix(host[1:], "]")
	}
	return config.Loopback(strings.ToLower(host)) && bracketed == strings.Contains(host, ":") // as RFC 3986 writes addresses, and no other way
}

var origins = http.NewCrossOriginProtection()

// crossSite finds requests that a browser sent for another site: any write, and any
// read except a link that was followed to a page. Reads cost, too, and a profile
// takes a minute of CPU, so links from other sites may not lead to /debug at all.
func crossSite(r *http.Request) bool {
	as := *r
	as.Method = http.MethodPost // the check lets every read pass
	if origins.Check(&as) == nil {
		return false
	}
	read := r.Method == http.MethodGet || r.Method == http.MethodHead
	dest := r.Header.Get("Sec-Fetch-Dest") // a frame has another value
	link := r.Header.Get("Origin") == "" && r.Header.Get("Sec-Fetch-Mode") == "navigate" && (dest == "" || dest == "document")
	return !read || !link || strings.HasPrefix(r.URL.Path, "/debug/")
}

// isJSON: a form or a plain text is what a page may send anywhere unasked.
func isJSON(r *http.Request) bool {
	kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	return err == nil && kind == "application/json"
}

// maxBody is far more than any of these bodies needs.
const maxBody = 1 << 20

// keepToOurselves has browsers keep answers from the pages of other sites.
func keepToOurselves(h http.Header) {
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("X-Frame-Options", "DENY")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
}

func fail(w http.ResponseWriter, status int, code, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(openai.NewError(status, code, message).JSON())
}

// handler serves one proxy.
type handler struct {
	g   *gateway.Gateway
	log *zap.Logger
}

func reply(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	_ = enc.Encode(v) // the operator left
}

// read decodes a small JSON body; a wrong one is answered.
func read(w http.ResponseWriter, r *http.Request, v any) bool {
	dec := json.NewDecoder(r.Body)
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		fail(w, http.StatusBadRequest, "bad_body", "the body is not the JSON this takes: "+err.Error())
		return false
	}
	return true
}

// choose puts the policy of the body in force, for what the log calls so.
func (h *handler) choose(w http.ResponseWriter, r *http.Request, what string, of interface {
	Policy() string
	SetPolicy(text string) error
},
) {
	var in struct {
		Policy string `json:"policy"`
	}
	if !read(w, r, &in) {
		return
	}
	before := of.Policy()
	if err := of.SetPolicy(in.Policy); err != nil {
		fail(w, http.StatusBadRequest, "bad_policy", err.Error())
		return
	}
	h.log.Info("an operator changed the "+what, zap.String("from", before), zap.String("to", of.Policy()))
	reply(w, map[string]string{"policy": of.Policy()})
}
