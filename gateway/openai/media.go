package openai

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"strings"

	"evenkeel/mooncake"
)

// content checks the parts of a message. Both engines fetch a media URL, from
// inside the cluster's network and at different times: it must be a data: URL
// or name a host that the operator trusts (contract 10).
func (p *parser) content(v json.RawMessage) *Error {
	if isObject(v) {
		if e := p.part(v); e != nil {
			return e.within(".")
		}
		return nil
	}
	n := 0
	for part := range mooncake.Elements(v) {
		if isObject(part) {
			if e := p.part(part); e != nil {
				return e.within(fmt.Sprintf("[%d].", n))
			}
		}
		n++
	}
	return nil
}

func (p *parser) part(part json.RawMessage) *Error {
	for key, v := range mooncake.Members(part) {
		switch key {
		case "image_url", "audio_url", "video_url", "file_url":
			if isString(v) { // the short form
				if e := p.mediaURL(key, v); e != nil {
					return e
				}
			}
			for inner, u := range mooncake.Members(v) {
				if inner == "url" && isString(u) {
					if e := p.mediaURL(inner, u); e != nil {
						return e.within(key + ".")
					}
				}
			}
		case "input_audio":
			p.mediaBytes += len(v)
		case "image_embeds", "audio_embeds", "video_embeds":
			return bad(CodeUnsupported, key, "%q is not supported: engines do not load tensors that clients send", key)
		}
	}
	return nil
}

func (p *parser) mediaURL(param string, v json.RawMessage) *Error {
	if bytes.HasPrefix(v, []byte(`"data:`)) {
		p.mediaBytes += len(v)
		return nil
	}
	if !p.allowed(unquote(v)) {
		return bad(CodeInvalidValue, param, "media must come as a data: URL%s", p.orFrom())
	}
	return nil
}

// allowed: an address that two parsers could read as two hosts is refused.
func (p *parser) allowed(text string) bool {
	if strings.ContainsAny(text, "\\ \t\r\n") {
		return false
	}
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.User != nil {
		return false
	}
	return slices.ContainsFunc(p.lim.MediaHosts, func(host string) bool { return strings.EqualFold(host, u.Host) })
}

func (p *parser) orFrom() string {
	if len(p.lim.MediaHosts) == 0 {
		return ""
	}
	return " or from " + strings.Join(p.lim.MediaHosts, ", ")
}
