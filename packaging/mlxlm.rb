# The Homebrew formula, whose HOMEPAGE, VERSION and SHA256 are filled in by .github/workflows/release.yml.
class Mlxlm < Formula
  desc "Train, quantize and chat with language models on Apple silicon, with MLX"
  homepage "HOMEPAGE"
  url "https://files.pythonhosted.org/packages/source/m/mlxlm/mlxlm-VERSION.tar.gz"
  sha256 "SHA256"
  license all_of: ["MIT", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "OFL-1.1"]

  depends_on arch: :arm64
  depends_on :macos
  depends_on "python@3.13"

  def install
    system Formula["python@3.13"].opt_libexec/"bin/python", "-m", "venv", libexec
    system libexec/"bin/pip", "install", "--no-cache-dir", buildpath
    bin.install_symlink libexec/"bin/mlxlm"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/mlxlm --version")
    system bin/"mlxlm", "chat", "small-world", "--offline", "-p", "What is 7 plus 5?"
  end
end
