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

// passedRules are the rules for a request that one engine serves alone. The engine checks all keys without a rule.
var passedRules = map[string]rule{
	"model":                setModel,
	"tools":                nil, // not searched for media: a tool's parameter may have the name of a media key
	"priority":             rules["priority"],
	"prompt_embeds":        rules["prompt_embeds"],
	"chat_template":        chatTemplate,
	"chat_template_kwargs": chatTemplateArgs,
}

// ParsePassed reads and checks the body of a request that goes to one engine unchanged, except that keys which no client may set are
// dropped. The request points into raw.
func ParsePassed(raw []byte, limits Limits) (*Request, *Error) {
	return parsePassed(raw, limits, mooncake.Chat, passedRules)
}

// parsePassed reads and checks the body of a request that goes to one engine. A key with a rule must not be repeated, and its rule checks
// the value; a nil rule checks no value. A key that only the proxy may set (mooncake.Reserved) must not be repeated either. The values of
// keys without a rule are searched for media. endpoint is the one whose messages the body has.
func parsePassed(raw []byte, limits Limits, endpoint mooncake.Endpoint, rules map[string]rule) (*Request, *Error) {
	body, err := mooncake.ScanBody(raw, limits.MaxDepth)
	if err != nil {
		return nil, badRequest(CodeInvalidJSON, "", "the request body is not acceptable: %v", err)
	}
	p := parser{limits: limits, req: &Request{Endpoint: endpoint, Body: body, N: 1}}
	for key, v := range body.All() {
		rule, hasRule := rules[key]
		onlyOnce := hasRule || mooncake.Reserved(key)
		if onlyOnce && body.Count(key) > 1 { // the engine could take another of the values than evenkeel
			return nil, badRequest(CodeDuplicateKey, key, "the key %q appears more than once; send it once", key)
		}
		var refusal *Error
		switch {
		case rule != nil:
			refusal = rule(&p, key, v)
		case !hasRule: // not in rules at all: evenkeel does not know the key, and the engine may find media in its value
			refusal = p.checkMediaIn(key, v)
		}
		if refusal != nil {
			return nil, refusal
		}
	}
	p.req.PromptBytes = len(raw) - p.mediaBytes // an estimate from above: the other keys of the body count, too
	return p.req, p.requireModel()
}

// requireModel gives a request without a model the only model that there is, as engines do (vLLM 0.33, _is_model_supported in
// entrypoints/serve/engine/serving.py). If there is not exactly one model, it refuses the request, because no engine can be chosen.
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
	if p.req.Body.Raw() != nil { // nil: the request is a form, which goes to the engine byte for byte
		name, _ := json.Marshal(p.req.Model) // marshalling strings cannot fail
		p.req.Body.Set("model", name)
	}
	return nil
}

// checkMediaIn checks all media in the value v, because the engine would fetch them from inside the cluster's network. path is the key of
// v. A plugin of the engine may also fetch URLs, or read files, under the key data.
func (p *parser) checkMediaIn(path string, v json.RawMessage) *Error {
	if _, refusal := p.checkMediaInValue(v, 0, path == "data"); refusal != nil {
		return refusal.prefixMember(shorten(path))
	}
	return nil
}

// checkMediaInValue checks the media in the value that begins at byte i of b, and returns the position after it, so that each byte is read
// only once. forPlugin is true if the value is under the key data, which is for plugins of the engine.
func (p *parser) checkMediaInValue(b json.RawMessage, i int, forPlugin bool) (end int, refusal *Error) {
	switch {
	case b[i] == '{':
		return p.checkMediaInObject(b, i, forPlugin)
	case b[i] == '[':
		array := rawjson.ArrayAt(b, i)
		for array.Next() {
			// numbers and strings contain no media; skipping them here saves time on a long list of token ids
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

// checkMediaInObject does what checkMediaInValue does, for an object. The object is itself a part with a medium if it has a key for media,
// or a type of such a part. checkPart checks such a part, and adds the bytes of its medium to p.mediaBytes. The members of the object may
// contain further parts. forPlugin is true if the object is under the key data of the request, which is for plugins with which an engine
// reads and writes data of any kind.
func (p *parser) checkMediaInObject(b json.RawMessage, i int, forPlugin bool) (end int, refusal *Error) {
	object, isPart := rawjson.ObjectAt(b, i), false
	for object.Next() {
		key, bytesBefore := rawjson.Key(object.Key), p.mediaBytes
		if object.Pos, refusal = p.checkMediaInValue(b, object.Val, forPlugin); refusal != nil {
			return 0, refusal.prefixMember(shorten(key))
		}
		switch v := object.Value(); {
		case mediaKeys[key]:
			// If the value has parts itself, their bytes are counted already. They are taken out of the count again, because
			// checkPart below counts the bytes of the whole value.
			isPart, p.mediaBytes = true, bytesBefore
		case key == "type" && isString(v):
			kind := rawjson.Unquote(v)
			isPart = isPart || mediaKeys[kind] || kind == "input_image" // this type is no key: its medium is under image_url
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

// checkDataFormat checks the format in which a plugin reads or writes data: it must be one of dataFormats, or null.
func checkDataFormat(key string, v json.RawMessage) *Error {
	if isNull(v) || isString(v) && slices.Contains(dataFormats, rawjson.Unquote(v)) {
		return nil
	}
	return badRequest(CodeUnsupported, shorten(key), "%q must be one of %s", shorten(key), strings.Join(dataFormats, ", "))
}

// dataFormats are the allowed formats of data. With others, a plugin reads or writes files on the engine's machine.
var dataFormats = []string{"b64_json", "base64", "bytes", "url"}

// checkData checks a string under the key data: it must not name a file of the engine's machine, nor an address that is not allowed.
func (p *parser) checkData(text string) *Error {
	jpeg := strings.HasPrefix(text, "/9j/") && !strings.Contains(text, ".") // the base64 of a JPEG begins with /9j/
	switch {
	case strings.HasPrefix(text, "/") && !jpeg, strings.HasPrefix(strings.ToLower(text), "file:"):
		return badRequest(CodeInvalidValue, "", "data must not name a file of the engine's machine; send what is in it")
	case strings.Contains(text, "://") && !p.mayFetch(text):
		return badRequest(CodeInvalidValue, "", "data must not name an address%s", p.hostsHint())
	}
	return nil
}

// mediaKeys are the keys under which a part of a message has a medium.
var mediaKeys = map[string]bool{
	"image_url": true, "audio_url": true, "video_url": true, "file_url": true, "input_audio": true,
	"image_embeds": true, "audio_embeds": true, "video_embeds": true, "image_pil": true, "prompt_embeds": true,
}

// maxFields bounds the fields of a form, and maxFieldBytes the bytes of a field that is not a file.
const (
	maxFields     = 64
	maxFieldBytes = 64 << 10
)

// ParseForm reads and checks a form with files, which goes to one engine byte for byte. A field that no client may set is therefore
// refused, while such a key is only dropped from a JSON body.
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
		if errors.Is(err, io.EOF) { // all fields have been checked
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

// checkField checks one field of a form, and stores the fields model and stream. seen has those of the two that came before in the form.
func (p *parser) checkField(part *multipart.Part, seen map[string]bool) *Error {
	if refusal := checkHeaders(part.Header); refusal != nil {
		return refusal
	}
	name := part.FormName()
	if name == "" || strings.Contains(part.Header.Get("Content-Disposition"), "name*") { // another parser might read another name
		return badRequest(CodeInvalidValue, "", "a field of the form has no plain name")
	}
	if mooncake.Reserved(name) {
		return badRequest(CodeUnsupported, name, "%q is not supported: it belongs to the proxy", shorten(name))
	}
	if part.FileName() != "" { // the field is a file, whose bytes only the engine reads
		if name == "model" {
			return badRequest(CodeInvalidType, name, "%q is a file; it must be the name of a model", name)
		}
		return nil
	}
	value, err := io.ReadAll(io.LimitReader(part, maxFieldBytes+1)) // one byte more, to see whether the field is too long
	if err != nil || len(value) > maxFieldBytes {
		return badRequest(CodeInvalidValue, shorten(name), "the field %q is cut off, or has more than %d bytes",
			shorten(name), maxFieldBytes)
	}
	if name != "model" && name != "stream" { // only the engine uses the field
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
	p.req.Stream, _ = strconv.ParseBool(string(value)) // a word that is not a boolean counts as false here, and the engine may refuse it
	return nil
}

// checkHeaders refuses headers of a field that parsers may read differently: unusual headers, and a header that comes twice.
// Content-Transfer-Encoding also passes, because some HTTP libraries add it. The error does not name it, because no client needs it.
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
