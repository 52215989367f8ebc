package openai

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"mime/multipart"
	"slices"
	"strconv"
	"strings"

	"evenkeel/internal/rawjson"
	"evenkeel/mooncake"
)

// passedRules are for a request that one engine serves alone. The engine checks all other keys.
var passedRules = map[string]rule{
	"model": setModel,
	// Not searched for media: a tool's parameter may have the name of a media key.
	"tools":                nil,
	"priority":             rules["priority"],
	"prompt_embeds":        rules["prompt_embeds"],
	"chat_template":        chatTemplate,
	"chat_template_kwargs": chatTemplateArgs,
}

// ParsePassed reads a request that goes to one engine unchanged, except for keys that no client may
// set. It points into raw.
func ParsePassed(raw []byte, limits Limits) (*Request, *Error) {
	return parsePassed(raw, limits, mooncake.Chat, passedRules)
}

// parsePassed reads a request that goes to one engine. Keys with a rule, which may be nil, and
// those that only the proxy may set (mooncake.Reserved) must not be repeated. Values of other keys
// are searched for media. The messages are those of endpoint.
func parsePassed(raw []byte, limits Limits, endpoint mooncake.Endpoint, rules map[string]rule) (*Request, *Error) {
	body, err := mooncake.ScanBody(raw, limits.MaxDepth)
	if err != nil {
		return nil, badRequest(CodeInvalidJSON, "", "the request body is not acceptable: %v", err)
	}
	p := parser{limits: limits, req: &Request{Endpoint: endpoint, Body: body, N: 1}}
	for key, v := range body.All() {
		rule, hasRule := rules[key]
		onlyOnce := hasRule || mooncake.Reserved(key)
		if onlyOnce && body.Count(key) > 1 { // the engine could take another value than evenkeel
			return nil, badRequest(CodeDuplicateKey, key, "the key %q appears more than once; send it once", key)
		}
		var refusal *Error
		switch {
		case rule != nil:
			refusal = rule(&p, key, v)
		case !hasRule: // evenkeel does not know the key, and the engine may find media in its value
			refusal = p.checkMediaIn(key, v)
		}
		if refusal != nil {
			return nil, refusal
		}
	}
	p.req.PromptBytes = len(raw) - p.mediaBytes // from above: the other keys count, too
	return p.req, p.requireModel()
}

// A request without a model gets the only one, as in engines (vLLM 0.33, _is_model_supported in
// entrypoints/serve/engine/serving.py).
func (p *parser) requireModel() *Error {
	if p.req.Model != "" {
		return nil
	}
	if p.limits.OnlyModel != nil {
		p.req.Model = p.limits.OnlyModel()
	}
	if p.req.Model == "" {
		return badRequest(CodeMissing, "model", "the request names no model; set \"model\"")
	}
	if p.req.Body.Raw() != nil { // nil: a form, which goes to the engine byte for byte
		name, _ := json.Marshal(p.req.Model) // cannot fail
		p.req.Body.Set("model", name)
	}
	return nil
}

// The engine would fetch media from inside the cluster's network. A plugin of the engine may also
// fetch URLs, or read files, under the key data.
func (p *parser) checkMediaIn(path string, v json.RawMessage) *Error {
	if _, refusal := p.checkMediaInValue(v, 0, path == "data"); refusal != nil {
		return refusal.prefixMember(shorten(path))
	}
	return nil
}

// checkMediaInValue checks the value at byte i of b, and returns the position after it, so that
// each byte is read only once. forPlugin: it is under the key data, which is for plugins of the
// engine.
func (p *parser) checkMediaInValue(b json.RawMessage, i int, forPlugin bool) (end int, refusal *Error) {
	switch {
	case b[i] == '{':
		return p.checkMediaInObject(b, i, forPlugin)
	case b[i] == '[':
		array := rawjson.ArrayAt(b, i)
		for array.Next() {
			// Skipping values without media here saves time on a long list of token ids.
			if first := b[array.Val]; first != '{' && first != '[' && !forPlugin {
				continue
			}
			if array.Pos, refusal = p.checkMediaInValue(b, array.Val, forPlugin); refusal != nil {
				return 0, refusal.prefixMember("[" + strconv.Itoa(array.N-1) + "]")
			}
		}
		return array.Pos, nil
	}
	end = rawjson.ValueEnd(b, i)
	if forPlugin && b[i] == '"' {
		refusal = p.checkData(rawjson.Unquote(b[i:end]))
	}
	return end, refusal
}

// An object is a part with a medium (checkPart) if it has a key for media, or a type of such a
// part. Its members may contain further parts.
func (p *parser) checkMediaInObject(b json.RawMessage, i int, forPlugin bool) (end int, refusal *Error) {
	object, isPart := rawjson.ObjectAt(b, i), false
	for object.Next() {
		key, bytesBefore := rawjson.Key(object.Key), p.mediaBytes
		if object.Pos, refusal = p.checkMediaInValue(b, object.Val, forPlugin); refusal != nil {
			return 0, refusal.prefixMember(shorten(key))
		}
		switch v := object.Value(); {
		case mediaKeys[key]:
			// The bytes of parts in the value are taken out of the count again, because checkPart below
			// counts the whole value.
			isPart, p.mediaBytes = true, bytesBefore
		case key == "type" && isString(v):
			kind := rawjson.Unquote(v)
			isPart = isPart || mediaKeys[kind] || kind == "input_image" // whose medium is under image_url
		case forPlugin && strings.HasSuffix(key, "data_format"):
			if refusal = checkDataFormat(key, v); refusal != nil {
				return 0, refusal
			}
		}
	}
	if isPart {
		refusal = p.checkPart(b[i:object.Pos])
	}
	return object.Pos, refusal
}

func checkDataFormat(key string, v json.RawMessage) *Error {
	if isNull(v) || isString(v) && slices.Contains(dataFormats, rawjson.Unquote(v)) {
		return nil
	}
	return badRequest(CodeUnsupported, shorten(key), "%q must be one of %s", shorten(key), strings.Join(dataFormats, ", "))
}

// With other formats, a plugin reads or writes files on the engine's machine.
var dataFormats = []string{"b64_json", "base64", "bytes", "url"}

// Under data there must be no file of the engine's machine, nor an address that is not allowed.
func (p *parser) checkData(text string) *Error {
	// The base64 of a JPEG begins with /9j/.
	jpeg := strings.HasPrefix(text, "/9j/") && !strings.Contains(text, ".")
	switch {
	case strings.HasPrefix(text, "/") && !jpeg, strings.HasPrefix(strings.ToLower(text), "file:"):
		return badRequest(CodeInvalidValue, "", "data must not name a file of the engine's machine; send what is in it")
	case strings.Contains(text, "://") && !p.mayFetch(text):
		return badRequest(CodeInvalidValue, "", "data must not name an address%s", p.hostsHint())
	}
	return nil
}

// mediaKeys are for media in a part of a message.
var mediaKeys = map[string]bool{
	"image_url": true, "audio_url": true, "video_url": true, "file_url": true, "input_audio": true,
	"image_embeds": true, "audio_embeds": true, "video_embeds": true, "image_pil": true, "prompt_embeds": true,
}

// maxFieldBytes is for a field that is not a file.
const (
	maxFields     = 64
	maxFieldBytes = 64 << 10
)

// ParseForm checks a form with files, which goes to one engine byte for byte. So a field that no
// client may set is refused, and not only dropped as from JSON.
func ParseForm(raw []byte, contentType string, limits Limits) (*Request, *Error) {
	kind, params, err := mime.ParseMediaType(contentType)
	if err != nil || kind != "multipart/form-data" || params["boundary"] == "" {
		return nil, badRequest(CodeInvalidType, "", "the body must be a form; send Content-Type: multipart/form-data with its boundary")
	}
	p := parser{limits: limits, req: &Request{N: 1, PromptBytes: len(raw)}}
	parts := multipart.NewReader(bytes.NewReader(raw), params["boundary"])
	seen := map[string]bool{}
	for fields := 0; ; fields++ {
		part, err := parts.NextRawPart()
		if errors.Is(err, io.EOF) {
			return p.req, p.requireModel()
		}
		if err != nil {
			return nil, badRequest(CodeInvalidValue, "",
				"the form cannot be read: it is cut off, or its boundary is not the one of Content-Type")
		}
		if fields == maxFields {
			return nil, badRequest(CodeInvalidValue, "", "the form has more than %d fields", maxFields)
		}
		if refusal := p.checkField(part, seen); refusal != nil {
			return nil, refusal
		}
	}
}

// seen has the fields model and stream that came before.
func (p *parser) checkField(part *multipart.Part, seen map[string]bool) *Error {
	if refusal := checkHeaders(part.Header); refusal != nil {
		return refusal
	}
	name := part.FormName()
	if name == "" || strings.Contains(part.Header.Get("Content-Disposition"), "name*") {
		// Another parser might read another name.
		return badRequest(CodeInvalidValue, "", "a field of the form has no plain name")
	}
	if mooncake.Reserved(name) {
		return badRequest(CodeUnsupported, name, "%q is not supported: it belongs to the proxy", shorten(name))
	}
	if part.FileName() != "" { // only the engine reads a file
		if name == "model" {
			return badRequest(CodeInvalidType, name, "%q is a file; it must be the name of a model", name)
		}
		return nil
	}
	// One byte more shows whether the field is too long.
	value, err := io.ReadAll(io.LimitReader(part, maxFieldBytes+1))
	if err != nil || len(value) > maxFieldBytes {
		return badRequest(CodeInvalidValue, shorten(name), "the field %q is cut off, or has more than %d bytes",
			shorten(name), maxFieldBytes)
	}
	if name != "model" && name != "stream" { // only for the engine
		return nil
	}
	if seen[name] {
		return badRequest(CodeDuplicateKey, name, "the field %q appears more than once; send it once", name)
	}
	seen[name] = true
	if name == "model" {
		if len(value) > maxModelBytes {
			return badRequest(CodeInvalidValue, name, "%q has more than %d bytes", name, maxModelBytes)
		}
		p.req.Model = string(value)
		return nil
	}
	// Other words count as false here, and the engine may refuse them.
	p.req.Stream, _ = strconv.ParseBool(string(value))
	return nil
}

// checkHeaders refuses headers that parsers may read differently. Content-Transfer-Encoding passes,
// because some HTTP libraries add it; no client needs it, so the error does not name it.
func checkHeaders(headers map[string][]string) *Error {
	for name, values := range headers {
		isUsual := name == "Content-Disposition" || name == "Content-Type" || name == "Content-Transfer-Encoding"
		switch {
		case !isUsual:
			return badRequest(CodeUnsupported, "",
				"a field of the form has the header %q; send Content-Disposition and Content-Type only", shorten(name))
		case len(values) > 1:
			return badRequest(CodeDuplicateKey, "", "a field of the form has the header %q more than once; send it once", name)
		}
	}
	return nil
}
