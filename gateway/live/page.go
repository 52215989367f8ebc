package live

import (
	"embed"
	"io/fs"
	"net/http"
	"path"

	"evenkeel/docs"
)

//go:embed page
var files embed.FS

// contentPolicy lets the page load files of this listener only. It also forbids that text becomes
// markup or code, because names of models, engines and requests come
// from outside and may be hostile.
const contentPolicy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"

// Page returns the handlers of the page's files by their paths: / is the page, /page/ has its
// modules. The files contain nothing about this proxy, so they need no token. The page asks for the
// token and sends it with GET /live.
func Page() map[string]http.Handler {
	pages, err := fs.Sub(files, "page")
	if err != nil { // impossible: the folder is embedded
		panic(err)
	}
	all := map[string]http.Handler{}
	for at, name := range map[string]string{"/{$}": "index.html", "/live.js": "live.js", "/live.css": "live.css", "/live.svg": "live.svg"} {
		all[at] = restricted(func(w http.ResponseWriter, r *http.Request) { http.ServeFileFS(w, r, pages, name) })
	}
	all["/page/{module}"] = restricted(func(w http.ResponseWriter, r *http.Request) {
		name := r.PathValue("module")
		if path.Ext(name) != ".js" {
			http.NotFound(w, r)
			return
		}
		http.ServeFileFS(w, r, pages, name)
	})
	all["/runbook.md"] = restricted(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/markdown; charset=utf-8")
		_, _ = w.Write(docs.Runbook) // an error means that the operator has left
	})
	return all
}

// restricted adds headers that restrict what a browser may do with the file: no foreign content, no
// frames, no guessed types.
func restricted(serve http.HandlerFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", contentPolicy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("X-Frame-Options", "DENY")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cache-Control", "no-cache") // after an upgrade, the browser must load the new page
		serve(w, r)
	})
}
